"""Training progress as a line of figures, and ranks behind a notebook's cells (`%ranks`). It uses only public names.

How cells run on ranks: `%ranks 4` starts engines of ipyparallel that share one process group (`pool.py`,
`engine.py`). A cell is sent to all of them. One rank's output is shown as it comes, the others' on demand, and an
error once (`cells.py`).

Invariants:

- An interrupt stops all ranks before the same step. Every rank counts its compiled steps in memory that all share.
  The notebook names a step that none has reached, and each rank raises before it. So no rank waits for one that has
  stopped, and all have the same state. A cell in which no step begins for 5 s is interrupted where it is.
- If a rank fails alone, the others have 5 s to end. Then it leaves the group with its message, which ends their
  transfers.

Start reading: `progress.py`, then `pool.py`.
"""
