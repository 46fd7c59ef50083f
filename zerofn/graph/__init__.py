"""The captured step as a graph: its program, nested graphs, aliasing, liveness, edits, and what its values depend on.

Words:

- *program*: one FX graph of local operations, the meaning of its inputs and outputs, and the buffers it needs
  (`program.py`).
- *body*: a graph that a node runs (`nested.py`). A loop over microbatches is one node, `repeat`. A body that runs
  once, on values, is a node `call`, which hands its inputs over, so that each is freed at its last use inside.
- *region*: a body that computes and does nothing else, for a compiler (`zerofn.lowering`). In a pipeline, the part of
  a microbatch between parameters and their gradients (`region.py`).
- *segment*: a part of the forward pass, usually a layer, from whose inputs activations are recomputed
  (`segments.py`).
- *own value*: a value that differs from rank to rank along some axes of the mesh (`own_values.py`).

The graph is the schedule. The generated code frees each value after its last use, so the position of a node decides
what is alive. Passes move, copy and replace nodes locally (`edit.py`), and nothing sorts the graph again. So the
order of transfers is the same on all ranks that captured the same operations. `fingerprint.py` writes that order
down, and ranks compare it before the first run.

Memory: `liveness.py` walks a scheduled graph and computes, to the byte, the memory alive while each node runs, by
kind. `step.lower(...)` reports it. `buffers.py` has the requests for static buffers and drive space that passes
append to a program.

Segments begin where a unit's parameters are first used; in a model of one unit, where a leaf's are. What crosses from
one segment to the next is always saved, so nothing is recomputed from farther back than its own segment. Segments are
joined by the memory that they need: a transformer's layers stay separate, the matrices of one layer do not. Values
that all layers use, such as T5's relative positions, change nothing.

Which values differ between ranks:

- `own_values.py` follows, along each axis, what depends on a rank's own batch, random key or position. A transfer
  along an axis makes a value equal along that axis. A value that still differs along another axis may not change
  the state.
- A Python number or an index that differs leaves no trace in a rank's graph. So each value gets a number that follows
  from the expression that computes it (`value_numbers.py`), and ranks along an axis compare these numbers. A value
  whose number another rank lacks is an own value along that axis. `local_value_numbers.py` does the same for what
  ranks compute of their own rows.

Pipelines:

- `split.py` makes two calls of a body, its forward and its backward pass. `cut.py` cuts the body of a microbatch into
  pieces: the forward pass (F), the gradients that earlier stages need (I), and those of parameters (W).
- `region.py` says what every rank computes alike. `boundaries.py` chooses where stages begin: where the fewest bytes
  cross. `stages.py` says on which stage each value is computed, and what is sent. If several stages read a value that
  is made of a parameter once, each stage takes its own sum of gradients back to the parameter.
- From the second microbatch on, a piece takes the sums of gradients so far and adds to them (`running_sums.py`).

Graphs that torch's own operations run (`torch.cond`) may compute, and nothing else: no writes, draws or transfers.

Start reading: `program.py`, then `nested.py` and `liveness.py`.
"""
