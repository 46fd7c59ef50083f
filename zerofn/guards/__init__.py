"""Guards: read what a captured step depends on outside its arguments, so that a change is noticed at the next call.

Words:

- *fact*: a path, such as `model.h[0].training`, and a value that can be compared (`tokens.py`).
- *reading*: all facts of a step (`walk.py`).
- *place*: where the object of a fact is held; a model of a thousand modules has some ten thousand (`table.py`).

How a change is noticed: at capture, `walk.py` follows the user's functions (code, defaults, cells, the globals that
they name), modules, containers and configs, and of other objects the attributes that the user's code names. Before
every step, `table.py` compares all places with the objects that they held, in a few calls of C code. Tensors are
compared by version, by address and, if small, by their bytes (`tensors.py`). `torch_settings.py` has the settings of
torch that decide which operations are recorded.

Invariant: a capture is used again only while everything it read is the same. `docs/sharp_bits.md` lists what is read,
and what is frozen.

An attribute inside a library's object may not matter to the step. If only such attributes have changed, this rank
alone captures again and compares the graphs (`zerofn/runtime/guarded_captures.py`, `zerofn/graph/same_graph.py`). If
they are the same, that attribute is not compared again.

Start reading: `walk.py`, then `table.py`.
"""
