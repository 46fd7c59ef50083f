"""What a step is (capture), what it does to memory (alias), and what may be done to it (edit, verify)."""
