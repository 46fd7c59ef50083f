"""Machines that are not there, and scripts that run up to their first training step."""
