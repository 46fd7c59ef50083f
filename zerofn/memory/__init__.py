"""Memory: the host's allocator, page-locked buffers, arenas, and donated tensors."""
