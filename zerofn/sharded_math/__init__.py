"""Mathematics over sharded trees: norms and dot products, sums over dims, functions of whole leaves, noise.

A shard holds consecutive elements of leaves, so it can compute its part of every sum, and only sums are sent
(`reductions.py`, `axis_reductions.py`). Rules of whole matrices, such as Muon's, get them by one more all-gather
(`whole_leaves.py`). `normal_like.py` draws noise that does not depend on the number of ranks.

Invariants:

- A leaf is cut at the boundaries of ranks' shards at every stage, each part is reduced by itself, and parts are added
  in rank order, then leaves in the tree's order. So every stage gives the same bits at a fixed number of ranks, and
  one rank gives those of `torch.nn.utils.get_total_norm`.
- Padding is never read.
- A slice that several ranks hold counts once in a norm.

Start reading: `reductions.py`.
"""
