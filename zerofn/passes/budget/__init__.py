"""Which values a budget of memory keeps, and which are dropped and brought back."""
