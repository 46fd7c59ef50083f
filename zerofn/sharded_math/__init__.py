"""Mathematics over sharded trees: numbers over whole trees, sums over dims, functions of whole leaves, noise."""
