"""State on drives: what the drive does, what a step makes of it, and the memory that is left."""
