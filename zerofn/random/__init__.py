"""Randomness as a function of a key: `randomness(key)` replaces every random operation inside.

Words:

- *key*: an int64 tensor; `key(seed)` makes one, and `fold_in` makes keys from keys.
- *position*: the number of draws since `randomness` was entered.

How a draw is made: a dispatch mode below autograd replaces each random operation of torch by an operation of
`draws.py`, which takes the key and the position. A training step folds the step's number, the rank and the microbatch
into the key of its state.

Invariants:

- A draw is a function of (key, step, rank, microbatch, position in the loss function). So eager and captured code
  draw the same bits.
- Recomputation in the backward pass draws at the position of the forward pass. `torch.utils.checkpoint` saves the
  states of generators, and inside `randomness` such a state is the position (`rng_state.py`).
- A rank draws on its own where it has slices or tokens of its own, and all ranks draw the same where they hold the
  same values or parts of one sum.
- Noise in the layout of a state is drawn in blocks at fixed positions of a leaf (`noise.py`), so it does not depend
  on the number of ranks.

Start reading: `mode.py`, then `draws.py`.
"""

from typing import TYPE_CHECKING

from ..util.names import of_package
from .draws import fold_in, key
from .mode import randomness

__all__ = ["fold_in", "key", "randomness"]


if not TYPE_CHECKING:
    __getattr__, __dir__ = of_package(__name__, __all__)
