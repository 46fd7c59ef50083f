"""A training step beside other systems', and what ZeroFn itself costs."""
