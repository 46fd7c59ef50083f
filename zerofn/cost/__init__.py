"""The cost of operations and transfers on a machine, known by name or measured, and the simulated step."""
