"""What a step will need and do, before it runs: plans, tables, pictures, and profiles beside them."""
