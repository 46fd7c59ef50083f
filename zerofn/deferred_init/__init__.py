"""Deferred initialisation: record what a function does to tensors, then replay it leaf by leaf, in little memory.

Words:

- *recording*: the calls that a function made on fake tensors (`record.py`, `call_log.py`).
- *buffer version*: the content of a buffer from one complete overwrite to the next, so that calls depend on versions,
  as in static single assignment.
- *replay*: the same calls on real tensors, in an order that keeps few buffers alive (`materialize.py`).
- *skeleton*: a module with the shapes of its parameters, and no values (`skeleton.py`).

How a state is made: `shard(init)` calls `record(init)`. `Replay.run` then hands out one leaf at a time, of which each
rank keeps its shard. So the whole state never exists on one rank.

Invariants:

- A replay gives the bits of a plain call, and leaves torch's generators as a plain call does: draws keep their order,
  also those that are overwritten later. `rng_marks.py` notices seeds and states that the function sets.
- Ranks compare their recordings as text (`recording_text.py`); an initialisation that differs on another rank is
  refused.

Start reading: `record.py`, then `materialize.py`.
"""

from .materialize import Replay as Replay
from .materialize import record as record
