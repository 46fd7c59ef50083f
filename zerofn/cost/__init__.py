"""What operations and transfers cost, on a machine known by name or measured here, and the simulated step."""
