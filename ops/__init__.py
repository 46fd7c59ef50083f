"""Update kernels: one header per rule, shared by the CPU library and the CUDA kernels."""
