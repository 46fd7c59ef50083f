"""Dry runs: fake machines to plan for, and scripts that run up to their first training step."""
