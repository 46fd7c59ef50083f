"""Dry runs: machines that need not exist, for plans, and scripts that stop at their first training step.

Words:

- *fake machine*: a context in which tensors have shapes and no memory, no drive is touched and no rank is asked.
- *dry run*: a step laid out and planned on such a machine.

How a plan uses it: inside `fake_machine`, `shard` lays a state out as always, and capture and schedule run the same
code as in a real step. So a plan's bytes are those that `step.lower` reports on real ranks; tests compare them. For a
script, `script.py` runs it up to the first compiled step, and stops there with the step and its batch.

Choice: without a GPU, torch cannot differentiate fake CUDA tensors. So the device "cpu" stands for an accelerator,
because torch has the same fused operations there, and "meta" stands for its host. The tensors of torch's CPU
operations are taken for those of its GPU operations; a few differ, such as what attention with dropout saves.

Invariant: few files know of dry runs, and `tests/test_house.py` lists them with the reason of each. All other code
treats fake tensors as any tensors.

Start reading: `fake_machine.py`.
"""
