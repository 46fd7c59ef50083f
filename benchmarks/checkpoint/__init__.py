"""How checkpoints stand faults, and what they cost beside other libraries'."""
