"""On one GPU: bits, kernels, and models that do not fit."""
