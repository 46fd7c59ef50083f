"""Decide which values a memory budget keeps, and which are dropped and brought back."""
