"""What codes have left out of gradients, for a state to feed back: error feedback (Seide et al., Interspeech 2014;
Karimireddy et al., ICML 2019, arXiv:1901.09847).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import tree


@dataclass(frozen=True)
class Feedback:
    """`errors`: a tree like the trained parameters, float32 at least, of gradients that are not scaled. Each rank has
    an entry [*shape] of its own: leaves are [ranks, *shape]. All entries together are what the sum over ranks of all
    gradients so far lacks of what ranks had. On another number of ranks it stays so: rank r gets the sum of the entries
    r, r + ranks, ...
    """

    errors: Any

    stored_over: ClassVar[dict[str, str]] = {"errors": "ranks"}


tree.register_dataclass(Feedback)


def zeros(params: Any) -> Feedback:
    """Return what nothing was left out of yet: one entry of zeros, which takes no memory. `params`: a plain tree."""

    def one(x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=x.device).expand(1, *x.shape)

    return Feedback(tree.tree_map(one, params))


def check_one(left: Sequence[Any]) -> Any:
    """Return what the one gradient that was taken of a state has left out; None if none was. Raises `ValueError` for
    several.
    """
    if len(left) > 1:
        raise ValueError(
            f"apply_gradients: value_and_grad was called {len(left)} times on this state, and with feedback=True each "
            "call would add the rounding error of the last step. Call it once: write a loss function that adds the "
            "losses, or use zerofn.accumulate for several microbatches."
        )
    return left[0] if left else None
