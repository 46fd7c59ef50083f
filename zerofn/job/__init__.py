"""The ranks of a job: who is there, what they agree on, and how all hear of one that fails or does not come."""
