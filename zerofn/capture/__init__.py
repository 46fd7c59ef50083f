"""Capture: the user's step becomes a graph, and what would make that graph wrong is refused with what to write."""
