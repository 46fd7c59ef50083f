"""Plans: what a step needs and takes before it runs, on machines that need not exist, as tables and pictures.

Words:

- *plan*: bytes, transfers and time of one scheduled step (`plan.py`). `step.lower` returns one, too.
- *row*: one way to train (mesh, stage, offload, budget), what it needs, and the line to write for it (`plan_row.py`).
- *estimate*: a row that is computed from two plans with few layers (`deep_models.py`).
- *kind*: a kind of step: a 1-bit optimizer's exact steps and its coded ones, or DiLoCo's inner steps (`kinds.py`).

How a table is made: `planner.py` has `zerofn.plan`. Inside a fake machine (`zerofn.dry_run`), `plan_variants.py` lays
the state out, captures and schedules the step for each row. `meshes.py` enumerates meshes, and a new axis gets its
sizes there. `search.py` plans those that may be the fastest, and says of the others why they were left out.

- Rank 0's slices are planned, which are the largest. If ranks of an axis run other operations by their number, as in
  ring attention, each is planned, and the one that needs the most is the plan.
- Of a model whose layers are alike, rows are estimated first: bytes of the state and of activations, and seconds,
  grow by the same with every layer, and static buffers do not grow. Estimates decide what is planned in full; none is
  recommended.
- A step of several kinds is planned as one step for each. The row is that of the last kind, and fits if all do.
  DiLoCo's steps are planned on the mesh of one replica, after the steps of all ranks together.
- On a mesh with `replicate`, stage 3 is also tried with hpZ if it does not fit without.
- A step may name another one to plan if it cannot be planned itself (`Step.otherwise`): configurations are planned
  with parts of the tokens, or without.
- Whether wire codecs are worth it is simulated (`wire.py`): a copy of the planned graph gets another codec in each
  transfer of a unit, and both run on the machine with its slowest links at some twenty rates. So the break-even rate
  accounts for transfers hidden behind computation, for the cost of coding, and for latencies.

`profile.py` puts a measured step beside the predicted one.

Invariant: the same code captures and schedules a planned step and a real one, so a plan's bytes are those of
`step.lower` on real ranks. Tests compare them.

Start reading: `planner.py`, then `search.py`.
"""
