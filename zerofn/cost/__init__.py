"""The cost of operations and transfers on a machine, known by name or measured, and the simulated run of a step.

Words:

- *machine*: the rates of a type of node in a few numbers (`machine.py`). `zerofn profile` measures them
  (`calibrate.py`).
- *lane*: a resource that does one thing at a time: the processor; the links between ranks, to the host and to drives;
  the host's updates.
- *timeline*: the schedule on these lanes (`simulator.py`).

How a step is timed: at a wait the processor idles until the transfer ends. On a machine known by name, a node takes
the time of its arithmetic or of its bytes, whichever is longer (`op_cost.py`). On this machine, every distinct
operation is run once on made-up values (`op_timer.py`). Before each run the timer writes as many bytes as the step
touches between the operation and its inputs' last use, to reproduce the state of the cache. All times are multiplied
by the ratio of the slowest rank to the average, because ranks wait for the slowest.

Links: transfers along each axis of a mesh have a lane. It is on the link within a node, or on the network if one line
of the axis crosses nodes (`links.py`), since ranks wait for the slowest. Lanes on one link share it: the transfer
with less left to send goes first, and the other is delayed by exactly that much.

Who asks: passes, for when a link is free and which alternative is cheaper; plans, for the time of a step.
`compile(machine=)` names the machine, and `zerofn.plan` writes it into the line that it recommends. The default is a
typical machine of the same kind, equal on every rank, so that ranks decide alike.

Limits: rates of machines known by name are sustained ones from published runs, and none of them was measured by us.
So plans for GPUs count bytes exactly, and estimate the times of kernels. A small step on a GPU waits for Python
instead: a T5-large with 16 pairs of sentences took 112 ms, of which kernels were 55, on a machine where plain torch
took as long. A profile of the machine counts that too, and predicted 1.12 and 1.18 times the measured seconds of two
steps.

Start reading: `machine.py`, then `simulator.py`.
"""
