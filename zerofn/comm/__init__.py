"""Between ranks: meshes and their axes, process groups, and transfers, each of which is a start and a wait.

Words:

- *mesh*: a grid of ranks. *Axis*: one direction of it, along which ranks share the work in one way (`mesh.py`).
- *transfer*: a *start*, which returns the tensor that will hold the result, and a *wait*. They are two nodes of a
  graph, so passes can put computation between them (`transport.py`).
- *wire codec*: the form in which numbers travel, such as "bf16" or blocks of 8-bit codes (`wire.py`,
  `block_wire.py`).
- *channel*: all messages from one rank to another one (`channels.py`).

What differs between ranks along an axis is one row of a table in `axes.py`, and all other code asks for its
properties:

| axis | batch | what a rank holds | gradients |
|---|---|---|---|
| `data` | other rows | other shards of each unit | averaged |
| `replicate` | other rows | the same shards | averaged |
| `expert` | other rows | other experts; other shards of all else | averaged; experts' not along this axis |
| `context` | other tokens of the same rows | other shards | averaged |
| `tensor` | the same | slices of layers | of slices: its own; of whole leaves: equal |
| `pipe` | the same | whole leaves of its stage | where the leaf is |

How a transfer runs: on gloo, all-gather and reduce-scatter are pairs of `isend` and `irecv`, because gloo's own
reduce-scatter is an all-reduce and a slice, which sends twice as much. A thread posts them: gloo's calls take a lock
that is held while bytes are copied, which would stop the step meanwhile. Other backends use their own collectives, on
contiguous tensors of dtypes that NCCL has; `tests/device` runs that branch on gloo and asserts it.

Invariants:

- Sums over ranks are taken in rank order on gloo, so all ranks, and all stages, get the same bits. NCCL sums in an
  order of its own, unless `compile(deterministic=True)`.
- Every rank of a group starts the same transfers in the same order. Tags count them, and `zerofn.job` compares what
  ranks do.
- This room does not know torch.fx.

Wire codecs:

- A codec is an argument of a transfer. Its start encodes and its wait decodes, so passes, fingerprints and plans see
  one start and one wait, with fewer bytes.
- An all-gather in bfloat16 receives into the second half of its result's memory, where the wait decodes it. Blocks of
  codes are in memory beside the result. A reduce-scatter holds its encoded rows until the wait, so its bucket is free
  as soon as it has started.
- A rank's own part is rounded like the parts of others, and stage 0, which sends no parameters, rounds them by
  `zerofn::rounded`. So every stage computes with the same numbers.
- Each block has its own scale, inside the transfer. One scale a tensor would be a maximum over all ranks, which every
  first gather of a step would wait for (0.5 ms between two processes over gloo). Scales are 0.8 % of the bytes. They
  are bfloat16 numbers, so the product of code and scale is exact in float32. The largest element of a block has the
  top code, so decoded numbers encode to themselves, and a rank may pass on what it received.
- Codes are never added. A reduce-scatter is an all-to-all of rows that were encoded once; the owner decodes them and
  adds in float32, in rank order.
- Which blocks of a unit are coded is part of the codec's name. So norms and biases travel uncoded in the same
  transfer. Units are cut into shards of whole blocks, and shards into whole blocks of 128 elements for replicas, so
  every stage has the same blocks.
- Stochastic rounding is an optional key of a reduce-scatter: the key that a draw of the loss function has on this
  rank, in this step and microbatch, and a number for the unit. A block's draws depend on these and on its number in
  the unit. So codes depend neither on threads nor on stages. Kernels read draws from a table of 2,048, at a random
  position for each block; on CPUs drawn codes cost as much as nearest ones. Only gradients are drawn. Parameters get
  nearest codes, which are equal each time they are sent; gathered copies and transfers in two hops rely on that.

Messages between devices: each channel has a process group of its own (`channel_groups.py`), because NCCL runs the
transfers of a communicator one after the other. In a shared group, each of two ranks could wait for a receive whose
send stands behind it on the other rank. Groups are made on all ranks when a step is captured, in one order, since
torch names a group by how many a process has made. gloo's messages have tags, so they share the axis's group.

Start reading: `axes.py`, then `mesh.py` and `transport.py`.
"""
