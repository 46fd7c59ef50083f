"""States whose every value is known, for the tests of checkpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

import zerofn
from zerofn import optim, tree


class Moving(NamedTuple):
    """A moving average and how many values are in it."""

    average: Any
    count: torch.Tensor


def _params() -> dict[str, torch.Tensor]:
    shapes = {"emb.w": (70, 1000), "h.0.w": (300, 301), "h.0.b": (301,), "h.1.w": (301, 300), "h.1.s": ()}
    return {name: torch.empty(shape) for name, shape in shapes.items()} | {"h.1.empty": torch.empty(0)}


def train_state(seed: int = 0, width: int = 301, extra: str = "extra") -> zerofn.TrainState:
    """A plain `TrainState`, all values drawn from `seed`; `width` changes a shape, `extra` a name."""
    params = _params()
    params["h.0.b"] = torch.empty(width)
    params["h.2.ids"] = torch.empty(5, dtype=torch.int64)
    state = zerofn.TrainState.create(
        params=params,
        tx=optim.adamw(1e-3),
        frozen=lambda name: name in ("emb.w", "h.2.ids"),
        extra={extra: Moving(params, torch.zeros(()))},
    )
    return draw(state.replace(step=torch.tensor(0)), seed)


def draw(state: Any, seed: int) -> Any:
    """`state` with random tensors of the same shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator).to(x.dtype)
        return torch.randint(0, 2**40, x.shape, generator=generator)

    return tree.tree_map(one, state)


def mixed_state(seed: int = 0) -> dict[str, Any]:
    """Containers and leaves of every kind, no parameters."""
    return draw(
        {
            "numbers": [3, 2.5, True, None],
            "pair": Moving(torch.empty(3, 2, dtype=torch.bfloat16), torch.tensor(4)),
            "td": TensorDict({"a": torch.empty(2, 3), "b": {"c": torch.empty(2)}}, batch_size=[2]),
            "transposed": torch.empty(4, 5).T,
            "double": torch.empty((), dtype=torch.float64),
            "scale": zerofn.DynamicLossScale(),
        },
        seed,
    )
