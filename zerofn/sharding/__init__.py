"""Sharding: the `Sharded` tree node, where and how its shards are stored, gather and scatter, `shard` and `unshard`.

Words:

- *Sharded*: a pytree node whose only leaves are this rank's shards, one flat tensor per unit (`sharded.py`).
  `tree_map(lambda p, g: p - lr * g, params, grads)` on two such trees returns the shards of the updated parameters.
- *Partition*: one frozen value that says over which ranks units are cut, over which ranks copies are refreshed, the
  slices of leaves, dtypes, wire codec, storage codec and tier (`partition.py`). Stages, hybrid sharding (MiCS) and
  hpZ are rows of a table in its docstring.
- *Spec*: the static part of a `Sharded`: its layout and the axes it is gathered along (`spec.py`).
- *copy*: a gathered unit beside the shards, at stages 1 and 2; with hpZ the part of a unit that a node's ranks share.
  It is a cache, `Sharded.full`, and no leaf: every unflatten drops it. If dtypes agree, the shard is a view of it and
  nothing is stored twice.

How a state is made: `shard_plan.py` decides what becomes of each leaf, `allocate.py` carries it out, `first_rank.py`
refuses an initialisation that differs between ranks. `shard.py` has the public functions.

How values move (`transfers.py`): one function gathers a unit, one reduces a gradient, one puts a leaf together from
slices.

| stage | parameters between steps | gather | scatter |
|---|---|---|---|
| 0 | whole | - | reduce-scatter and all-gather once a step |
| 1 | whole: a copy beside the shards | after the update, hidden behind the next forward pass | once a step |
| 2 | whole: a copy beside the shards | as at stage 1 | once a microbatch |
| 3 | shards | before each use; once a step where memory allows | once a microbatch |

- Ranks along `replicate` hold the same shards. After the reduce-scatter over `data`, each gradient shard is
  all-reduced over `replicate`, as a reduce-scatter and an all-gather, so that the halves can be scheduled separately.
- With hpZ (`shard(hpz=True)`) each shard of `data` is split again over `replicate`, and a rank updates only its part.
  After the update, one all-gather over `replicate` rebuilds the shard of `data`, as a copy; forward and backward
  gather units from these copies, over `data` only.
- Experts (`expert`): a unit of experts consists of slices. Its gradients are summed along `data` and `replicate`
  only, because `zerofn.moe` has brought the experts the tokens of all ranks. Every other unit is cut into shards
  along `expert` as along `data`.

Gather and scatter are linear maps and transposes of each other, under these inner products: a mean over ranks for
gathered values, and a sum over ranks for shards. So the transpose of the all-gather is the averaging
reduce-scatter. Gradients, Hessian-vector products and all higher orders are those of the global batch
(`gather_scatter.py`).

Entries of ranks and of replicas: `rank_entries.py` stores what each rank has for itself, such as errors of codes, as
leaves `[ranks, *shape]`. `replica_entries.py` does the same for replicas that train apart (`zerofn.diloco`), with
leaves `[replicas, *shape]`. Both are slices, so checkpoints, norms and checks need no special case. Inside a replica
the step sees `[*shape]`, on the mesh of the replica's ranks.

Sums of signs (`coded_sums.py`): a sum of 1-bit codes is signs again. A rank that has a shard of them gathers the
others at one bit an element, and they encode to themselves. So ranks need not hold the momentum whole at stages 1 to
3, and have the bits of stage 0, which gathers it after each update. Padding counts in no scale, since no checkpoint
has it.

Invariants:

- Treedefs compare names, shapes, offsets and axis; never dtype, stage, copy or donation. So trees of parameters,
  gradients and moments can always be mapped together.
- An operation that would give a local answer on a shard, such as a sum over a leaf, is refused when the step is
  captured.
- At one rank, every stage gives plain torch's bits. At N ranks all stages give each other's bits if a step has one
  microbatch; `zerofn.training` says what holds with more.

Start reading: `partition.py`, then `sharded.py` and `gather_scatter.py`.
"""
