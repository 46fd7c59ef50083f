"""Geometry: where each leaf of a tree lies, in slices, in units and in shards. Intervals only; nothing is sent.

Words:

- *leaf*: one tensor of a tree, such as `h.0.weight`.
- *unit*: leaves that are gathered together, usually a layer's (FSDP's parameter group): one flat buffer
  (`grouping.py`).
- *shard*: one of the N equal parts of a unit.
- *slice*: a rank's part of a leaf along `tensor`, `expert` or `pipe`, before its unit is cut into shards (`cuts.py`).

How a leaf gets its place (`layout.py`): a rank's leaf is the whole leaf, or its slice: intervals of one dim, perhaps
of another size on each rank, perhaps the same on several ranks. Leaves of a unit are raveled one after another.
Each begins at a multiple of 32 elements. The unit is padded so that it cuts into N shards of a multiple of 2,048
elements. For example, a weight of 1,000 elements and a bias of 10 at 2 ranks begin at 0 and 1,024, and the unit has
4,096 elements. A unit without elements on a rank has no transfers there.

Along `pipe` a leaf lies whole on one stage, or on several that read it, and other ranks have nothing of it: the
simplest slice.

Invariants:

- Padding is never read; it may hold anything.
- Layouts compare names, shapes, offsets and axis, but not dtypes. So parameters, gradients and moments have one
  layout.
- Only heads of keys and values may lie in slices that several ranks have. Whatever else ranks sum or join would count
  twice.

`overlaps.py` says what two slices of a leaf have in common, as runs of elements; checkpoints read by it.

Start reading: `layout.py`, then `cuts.py`.
"""
