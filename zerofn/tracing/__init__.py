"""Fast recording of operations on fake tensors, for capture and initialisation."""
