"""What a step needs and does, before it runs: plans, tables, pictures, and profiles to compare."""
