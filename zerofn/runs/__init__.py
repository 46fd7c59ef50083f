"""Runs: the checkpoints of a run in one folder, copies of its newest state in memory, and when a run must stop.

Words:

- *run*: one training from its first step to its last, over all restarts. `zerofn.Checkpoints` is a run's object
  (`manager.py`).
- *copy in memory*: a rank's checkpoint file in `/dev/shm` of its machine, and of the next machine (`replicas.py`).

Choices:

- The newest checkpoint is the one with the highest number in the folder. No pointer to it exists, so none can be
  wrong. `Checkpoints` counts steps itself, so no number has to leave the device.
- A rank that was asked to stop, by a signal or the end of its time, tells the others in an all-reduce about twice a
  second (`stopping.py`). How many steps are between two such questions is the same on all ranks, since it follows
  from the slowest rank's time.
- Every `replicate_every` steps each rank writes its checkpoint file to `/dev/shm`, and a thread sends it to the next
  machine, over a process group of its own. torchrun's agent keeps running when ranks are lost, so the folder in
  memory bears the agent's name. Another job never mistakes it for its own, and the next run removes folders whose
  agent has ended. A new machine is sent its ranks' files, and rank 0's, which has what is replicated. On one machine
  nothing is sent.

Invariant: a signal has one handler, however many runs listen (`signals.py`), and signals that no run waits for go to
the handler that was there before.

Start reading: `manager.py`.
"""
