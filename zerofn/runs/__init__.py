"""Runs: the checkpoints of a run in one folder, its newest state in its machines' memory, and when it is to stop."""
