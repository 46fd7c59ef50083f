"""Search for a schedule within a memory budget: which values stay in memory, and which are dropped and brought back.

Words:

- *drop*: a value leaves memory between two uses. It comes back by another gather, by recomputation, or, if the model
  computes on a device, from host memory (`drops.py`).
- *choice*: the decisions about one graph, by names of its nodes, which passes carry out (`decision.py`).

How the search runs (`search.py`): ZeroFn schedules the step with everything in memory. If that is too much, it drops
the values that free the most bytes for the longest time at the least cost (`eviction.py`: Belady's rule, weighted).
Then it undoes drops that turned out not to be needed, the most expensive first, schedules the result and weighs it
again, until it fits. A sixteenth of the budget is left for static buffers if possible. Gathers then start as early as
the rest of the budget allows. If a simulated run stalls for lack of memory, a second run drops more, to hold two
units ahead, and the faster of the two is used. If nothing fits, bisection finds the least budget that the same search
reaches, and the error names it. If logits may come in tiles, the search runs once more with tiles, unless the tiles
alone take longer than the schedule that was found; the faster result is used.

Other searches: `hoists.py` chooses units to gather once before a loop, and `by_stage.py` searches for one stage of a
pipeline.

Invariant: all ranks use the first rank's decisions, which name operations (`shared.py`). If names mean other
operations on other ranks, as in ring attention, each rank uses its own.

Start reading: `search.py`, then `drops.py`.
"""
