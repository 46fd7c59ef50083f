"""The ranks of a job: how they meet, what they agree on, and how all of them learn that one has failed.

Words:

- *store*: torch's rendezvous store, a table of texts that all ranks reach. torchrun holds it, or else rank 0.
- *agreement*: all ranks tell each other a text through the store, and all raise if texts differ (`agreement.py`). A
  collective would not do: the rank that never arrives is the case to report.
- *meeting*: one run of a captured step, one collective outside of steps, or one agreement (`step_order.py`).
- *sign of life*: a text that a thread of every rank writes to the store once a second (`heartbeat.py`).

How a job starts: `environment.py` reads which rank this process is. `rendezvous.py` lets ranks meet, under keys that
no earlier attempt of the job has used, because torchrun keeps its store when it starts a job again.

How ranks that run different code are found: at the start of a meeting each rank posts a short description of it to
its right neighbour. Before it uses a transferred result, writes to the state or returns, it compares its own
description with its left neighbour's. If they differ, every rank raises and no state has been written. Transfers
start in one order on all ranks; `zerofn/graph/fingerprint.py` writes that order down.

How a failure spreads: a rank that fails during a step leaves its message in the store, marks its state as lost and
takes its process group down. That ends the other ranks' transfers on gloo, and they find the message. NCCL's
transfers do not end by themselves, so the thread that gives signs of life also asks the store for failures, and
aborts the groups.

How long ranks wait:

- In an agreement: as long as it takes for a rank that writes to a slow drive; two minutes (`ZEROFN_PATIENCE`) for one
  that runs other code; 20 s for one that is frozen or gone.
- In a transfer inside a step: until the other process ends. Each rank also watches its right neighbour. If that rank,
  or the store, is silent for two minutes, threads let all of gloo's transfers fail. Under torchrun, which would wait
  30 s for a frozen rank, the ranks on its machine kill it as they stop. On NCCL the end of a failed and of a killed
  rank has been tried, and that of a frozen one has not.
- At the start: a rank that waits for others to start says for which ones.

Invariants:

- Whatever can be refused is refused before the first write. Ctrl-C waits until the caller has the new state. A rank
  that cannot capture or shard makes every rank raise its message and keep its state.
- Only ranks of the job are believed, because values in the store end jobs and name a process to kill. Each value is
  signed with the job's secret (`signed_store.py`), and an unsigned one counts as absent. `ZEROFN_SECRET`, the same on
  all ranks, is the secret. Without it one is drawn and left in the store: that keeps out mistakes, but not a person
  who reads the store. torchrun's store has no authentication, and the keys by which ranks first meet are torchrun's,
  unsigned. On a shared network, close its port with a firewall.
- A process that a rank has forked, such as a loader's worker, is not a rank. Collectives refuse to run in it, and its
  end is not a failure of the job.

Start reading: `agreement.py`, then `step_order.py` and `heartbeat.py`.
"""
