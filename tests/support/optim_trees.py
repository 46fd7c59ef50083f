"""Parameters and gradients for optimizer tests, and runs of a transformation over them, plain and sharded."""

from __future__ import annotations

from typing import Any

import torch

import zerofn
from zerofn import optim

STEPS = 4
SHAPES = {"h.0.w": (70, 61), "h.0.b": (61,), "h.1.w": (53, 47), "h.1.b": (47,), "norm": (131,), "s": ()}


def params(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Leaves of odd sizes, a scalar among them."""
    generator = torch.Generator().manual_seed(1)
    return {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in SHAPES.items()}


def grads(step: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Other gradients at every step, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(100 + step)
    out = {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in SHAPES.items()}
    out["h.0.b"][:5], out["h.0.b"][5:9] = 0.0, -0.0
    return out


def is_matrix(leaf: Any) -> bool:
    """A mask for weight decay."""
    return len(leaf.shape) > 1


def unit_of(name: str) -> str:
    """Two units, either with leaves of both kinds."""
    return "first" if name.startswith("h.0") else "rest"


def plain(tx: optim.GradientTransformation, dtype: torch.dtype = torch.float64, steps: int = STEPS) -> Any:
    """The state after some steps on full tensors, through `apply` where there is one."""
    state = zerofn.TrainState.create(params=params(dtype), tx=tx)
    for k in range(steps):
        state = state.apply_gradients(grads(k, dtype))
    return state


def by_optax(tx: Any) -> dict[str, torch.Tensor]:
    """The parameters after the same steps of a transformation of optax's, in float64."""
    import jax
    import numpy as np
    import optax

    with jax.enable_x64(True):
        values = {k: np.asarray(v) for k, v in params().items()}
        state = tx.init(values)
        for k in range(STEPS):
            updates, state = tx.update({name: np.asarray(v) for name, v in grads(k).items()}, state, values)
            values = optax.apply_updates(values, updates)
        return {k: torch.from_numpy(np.array(v)) for k, v in values.items()}


def by_updates(tx: optim.GradientTransformation, dtype: torch.dtype = torch.float64) -> Any:
    """The parameters after some steps of `update` and `apply_updates`."""
    values = params(dtype)
    state = tx.init(values)
    for k in range(STEPS):
        updates, state = tx.update(grads(k, dtype), state, values)
        values = optim.apply_updates(values, updates)
    return values


def sharded(
    tx: optim.GradientTransformation, stage: int, dtype: torch.dtype = torch.float64, *, updates: bool = False
) -> Any:
    """The state after the same steps on shards; all ranks have the same gradients."""
    start = zerofn.TrainState.create(params=params(dtype), tx=tx)
    state = zerofn.shard(start, stage=stage, unit=unit_of)
    if updates:
        state = state.replace(tx=optim.GradientTransformation(tx.init, tx.update))
    for k in range(STEPS):
        state = state.apply_gradients(zerofn.scatter(grads(k, dtype), like=state.params))
    return state


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], what: Any = None) -> None:
    """Bit for bit, but for the sign of zeros."""
    assert set(a) == set(b)
    for k in a:
        assert torch.equal(a[k], b[k]), (what, k, (a[k] - b[k]).abs().max())


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], what: Any = None, tol: float = 1e-12) -> None:
    """To rounding, in float64."""
    assert set(a) == set(b)
    for k in a:
        gap = (a[k] - torch.as_tensor(b[k])).abs().max().item()
        assert gap <= tol * max(1.0, a[k].abs().max().item()), (what, k, gap)
