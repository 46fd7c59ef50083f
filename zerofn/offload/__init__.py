"""State in host memory or on drives, as values that a step's graph brings, updates and puts back.

Words:

- *tier*: where a part of a shard is stored: with the model, in host memory, or on drives. `Offload` (`policy.py`)
  names the tiers of a state.
- *handle*: an int64 tensor of one element that stands for a tensor on a drive (`drive_tensor.py`).
- *aside*: on the thread that updates state on the host, while the caller continues to launch kernels
  (`host_worker.py`).

How a step uses it: for the step, a leaf is one tensor per shard, in the master's dtype. Capture decodes what is stored
at the start of the step and encodes it at the end, in the graph. `fetch` reads a handle and `write_drive_` writes it;
`bring` and `put_` do the same for host memory. So passes schedule these transfers as they schedule gathers, by moving
nodes, and `donate` lets an update rule work on the stored form directly.

Invariants:

- Offloaded and resident states have the same bits, at every stage, tier and number of ranks.
- A region of a drive belongs to one entry of one state. A value that moves to another entry is written to that
  entry's region, and a value in an arena that outlives the step is copied.
- What the host updates is complete before anything but the same captured step reads it.
- Drive reads share one arena. Each read, and each gradient that waits on a drive, has its place in it. A read into a
  place that is still being written from waits for that write.

Not done: parameters cannot be offloaded where ranks hold a gathered copy of them, which is at stages 1 and 2 and with
hpZ.

Start reading: `policy.py`, then `drive_tensor.py` and `host_tensor.py`.
"""
