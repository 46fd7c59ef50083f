"""Run a scheduled graph: backends, inputs and outputs, buffers, guards between steps, and what ranks compare.

Words:

- *backend*: an object with `bind(program) -> Runner`; *runner*: one scheduled graph, ready to run (`backend.py`).
- *executor*: the eager backend's runner: one generated Python function, `Executor.source` (`executor.py`).
- *signature*: structure, shapes, dtypes and numbers of a step's arguments, for which it was captured (`inputs.py`).
- *agreed capture*: a capture that all ranks have compared (`agreed_captures.py`).

How a call runs: `zerofn/compile.py` collects the inputs and their signature, and asks `guarded_captures.py` for a
capture whose facts still hold. Without one the step is captured, scheduled and compared between ranks
(`rank_comparison.py`). Before the first run `buffers.py` allocates what passes requested and writes the addresses
into the graph's nodes, and the backend makes a runner. `outputs.py` turns results into what the step returns.
`capture_log.py` logs each capture.

Choices:

- The executor binds every operation to a local name and runs below autograd's dispatch keys. If torch has a function
  that calls exactly that operation (`TORCH_FUNCTIONS` in `zerofn/ops/registry.py`), the name is bound to it, because
  the dispatcher's entry converts arguments by the schema, a microsecond each.
- A rank that meets new sizes of its own rows may capture alone (`agreed_captures.py`), if an agreed capture says the
  same of everything that ranks have in common.
- Ranks with other slices compare less: a captured step is compared in full among the ranks of one slice, and among
  all ranks only the transfers between slices. Ranks of a pipeline run different graphs. They compare the transfers in
  which all stages take part, and for each channel the list of what its sender sends (names, shapes, dtypes, in order)
  with the list of what its receiver expects.
- At stages 1 and 2, and with hpZ, a step returns when its update is done, while the all-gather of updated parameters
  is still under way. Its first reader waits for it, unit by unit: the next step, `gather`, or an evaluation.

Invariants:

- Old state in, new state out: the update is written into the old state's memory, and using the old state afterwards
  raises.
- Ctrl-C waits until the caller has the new state (`interrupts.py`).
- A runner is made before the first run of a signature. It is closed when the compiled step is collected, or before
  the step is captured again after a drive failed.
- `compile(deterministic=True)` gives the same bits on devices (`repeatable.py`): each rank gets its rows of all ranks
  and sums them itself, and torch uses kernels that repeat their results. Plain torch's bits then hold where it uses
  the same kernels.

Tests replace this room's runtime with adversarial ones; CONTRIBUTING.md lists them.

Start reading: `zerofn/compile.py`, then `captured_step.py` and `executor.py`.
"""
