"""Memory: budgets, recomputation, predictions beside measurements, and what fits on machines that are not there."""
