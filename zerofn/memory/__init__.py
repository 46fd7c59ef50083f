"""Where bytes lie: the host's allocator, page-locked buffers, arenas, what was given away."""
