"""The parts of a training step: gradients over ranks and microbatches, loss scales, remat, `TrainState`, DiLoCo.

Words:

- *state*: parameters, optimizer state and counters as one pytree (`train_state.py`).
- *seed*: the gradient of the loss with which the backward pass begins.
- *microbatch*: a part of a rank's batch; `accumulate` runs them one after another and sums their gradients
  (`gradient_sums.py`).
- *inner step*, *outer step*: of DiLoCo, a step of one replica alone, and the update by the mean of all replicas'
  changes.

How gradients are made: `value_and_grad` (`grad.py`) lends gathered parameters to the loss function and calls
`torch.autograd.grad` on detached leaves. Gradients become flat tensors, one per unit, and are reduced over ranks.
`state.apply_gradients` unscales them, checks that they are finite and updates.

Invariants:

- The mean over ranks and microbatches is in the seed, and no pass over the gradients divides them. For two or four
  ranks that is exact; for three it rounds as any division does.
- A step whose gradients are not finite is skipped: parameters and moments keep their values, and `state.skipped`
  counts it. A select on the device does that, so no number has to reach the host first.
- With more than one microbatch, stages 0 and 1, which reduce once a step, give each other's bits, and stages 2 and 3,
  which reduce in each microbatch, give each other's bits. The two pairs agree to rounding. `accumulate(reduce=)`
  chooses the order instead of the stage, and then all stages give the same bits. The search under a memory budget
  never changes the order of sums. These bits are promised on the host. On devices NCCL sums in an order of its own,
  and some kernels (attention's backward pass) add in no fixed order; `compile(deterministic=True)` repeats both
  (`zerofn/runtime/repeatable.py`).
- Recomputation sees the parameters that `functional_call` lent in the forward pass (`checkpoint_params.py`).

Error feedback (`feedback.py`): a rank encodes its gradient plus what its codes left out before, as a whole unit, and
stores what they leave out now: `x - zerofn::rounded(x)`, with the codes of the transfer, encoded once more. The error
is float32, divided by the loss scale and the sum of weights, so it means the same in every step. It is an entry of
each rank. `state.value_and_grad` leaves new errors beside the state, and `apply_gradients` takes them, or the old
ones if the step is skipped. So gradients keep their type, and a gradient that is not applied changes nothing.

Float8 (`float8.py`): while the loss function and its derivative run, `torch.nn.functional.linear` looks for a mark on
its weight, which leaves of the parameters have. So a step has the same bits compiled or not, and recomputed layers
round as they did; a pass could not tell from the graph which products belong to a layer. `Fp8.where` is asked once
for each matrix, when a state is sharded. Its answers are part of the partition, so captures, batch shapes and loaded
states follow one rule, ranks compare the answers, and states with equal answers share captures. Products are small
operations (`fp8_scale`, `fp8_codes`, `fp8_turned`, `fp8_mm`), so passes treat codes as activations. Codes of a weight
are made again in the backward pass, with the scale of the forward pass. Scales are powers of two, so codes do not
depend on how a device divides, and decoded numbers encode to themselves. With `Fp8(gather=True)` weights travel in
blocks of codes, as `wire="fp8"` sends them.

DiLoCo (`diloco.py`, `outer_step.py`): after some steps, parameters and moments differ between replicas, while all
other code assumes that ranks along `replicate` hold the same. So each replica's state is one entry of leaves
`[replicas, *shape]` (`zerofn/sharding/replica_entries.py`). The inner step runs on the mesh of the replica's ranks,
and nothing is reduced between replicas. The outer step also runs inside a replica, on what all replicas hold alike:
its parameters, its state and the mean of differences. Only this mean is sent between replicas, by eager transfers
between two captured steps, so it may be under way while inner steps run. What is under way is a cache beside the
tree: the state has the differences, which are sent again after a load. Which fragment is due follows from the number
of steps, which is on the host.

Start reading: `train_state.py`, then `grad.py`.
"""
