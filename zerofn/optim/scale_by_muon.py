"""Muon's direction: momentum whose matrices are orthogonalised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..sharded_math.axis_reductions import logical_leaves
from ..sharded_math.whole_leaves import map_whole
from ..util.arguments import checked, known_arguments
from . import checks
from .base import About, EmptyState, GradientTransformation, LeafInfo, count_zero, no_state
from .leaf_runs import spread
from .scale_by_adam import averaged, corrected, look_ahead

Coefficients = tuple[float, float, float]
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)  # chosen for the steepest slope at zero (Jordan 2024)


class MuonState(NamedTuple):
    """The state of `scale_by_muon`.

    `count`: applied updates, int64 scalar. `mu`: the momentum, in the parameters' structure and dtype.

    >>> scale_by_muon().init({"w": torch.zeros(1, 2)})
    MuonState(count=tensor(0), mu={'w': tensor([[0., 0.]])})
    """

    count: Tensor  # type: ignore[assignment]  # tuple.count gives way
    mu: Any


@checked("ns_steps", "nesterov", "adaptive")
def scale_by_muon(
    ns_coeffs: Coefficients | Sequence[Coefficients] = QUINTIC,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
) -> GradientTransformation:
    """Orthogonalise the momentum of each matrix by Newton-Schulz iterations (Jordan 2024).

    Each of `ns_steps` iterations is x <- a x + (b x x^T + c (x x^T)^2) x. It brings singular values nearer to one.
    The momentum is the average of gradients with decay `beta`; `nesterov` takes it as if the same gradient came
    once more. `ns_coeffs`: a, b and c, or a triple of them for each step. `adaptive` multiplies by the dual norm of
    the momentum (Bernstein and Newhouse 2024). `eps` is added to the norm that x is divided by at the start.

    Shards need whole matrices. At stages 1 to 3 every unit's momentum is gathered once a step, in its own dtype,
    and a rank iterates on the matrices of which its shard has a part. Raises `ValueError` for hyperparameters out
    of range, and in `init` for a leaf that does not have two dims.

    >>> tx, grads = scale_by_muon(ns_coeffs=(1.5, -0.5, 0.0), ns_steps=10), {"w": torch.diag(torch.tensor([3.0, 4.0]))}
    >>> tx.update(grads, tx.init(grads))[0]["w"].diag().round()  # both singular values are 1
    tensor([1., 1.])
    """
    triples = _triples("scale_by_muon", ns_coeffs, ns_steps)
    checks.number("scale_by_muon", 0.0, below=1.0, beta=beta)
    checks.number("scale_by_muon", 0.0, eps=eps)

    def init(params: Any) -> MuonState:
        for leaf in logical_leaves(params):
            _check_matrix(leaf)
        return MuonState(count_zero(params), tree.tree_map(torch.zeros_like, params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        count = state.count + 1
        mu = averaged(state.mu, grads, beta)
        ahead = look_ahead(grads, mu, beta, count) if nesterov else corrected(mu, beta, count)

        def rule(x: Tensor) -> Tensor:
            found = orthogonal(x, triples, eps)
            return (x * found).sum() * found if adaptive else found

        return map_whole(rule, ahead), MuonState(count, mu)

    args = (hashable(ns_coeffs), ns_steps, beta, eps, nesterov, adaptive)
    return GradientTransformation(init, update, About("scale_by_muon", args))


def orthogonal(x: Tensor, triples: Sequence[Coefficients], eps: float) -> Tensor:
    """Return a matrix [n, m] with the singular vectors of `x` and singular values near one, in its dtype."""
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    x = x / (torch.linalg.matrix_norm(x) + eps)
    for a, b, c in triples:
        gram = x @ x.t()
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.t() if tall else x


@known_arguments
def scale_by_shape(consistent_rms: float | None = None) -> GradientTransformation:
    """Multiply each matrix [out, in] by sqrt(max(1, out / in)) (Bernstein and Newhouse 2024).

    Dims are in the order of torch's weights; optax has inputs first. With `consistent_rms`, multiply by
    consistent_rms * sqrt(max(out, in)) instead: 0.2 gives updates the size of AdamW's (Liu et al. 2025). Raises
    `ValueError` for a negative `consistent_rms`.

    >>> tx, grads = scale_by_shape(), {"w": torch.ones(4, 1)}
    >>> tx.update(grads, tx.init(grads))[0]["w"].T  # times sqrt(4 / 1)
    tensor([[2., 2., 2., 2.]])
    """
    if consistent_rms is not None:
        checks.number("scale_by_shape", 0.0, consistent_rms=consistent_rms)

    def factor(leaf: LeafInfo) -> float:
        rows, columns = leaf.shape
        if consistent_rms is not None:
            return float(consistent_rms * max(rows, columns) ** 0.5)
        return float(max(1.0, rows / max(1, columns)) ** 0.5)

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        return tree.tree_map(lambda u, f: (u * f).to(u.dtype), updates, spread(updates, factor)), state

    return GradientTransformation(no_state, update, About("scale_by_shape", (consistent_rms,), label=factor))


def _check_matrix(leaf: LeafInfo) -> None:
    if leaf.ndim != 2:
        raise ValueError(
            f"scale_by_muon: leaf {leaf.name!r} has shape {list(leaf.shape)} and is not a matrix. Write optim.muon, "
            "which updates such leaves with AdamW, or optim.masked(scale_by_muon(), lambda leaf: leaf.ndim == 2), "
            "which skips them."
        )


def hashable(coefficients: Any) -> Any:
    """Return coefficients as tuples, so that transformations can be compared."""
    return tuple(tuple(x) if isinstance(x, list | tuple) else x for x in coefficients)


def _triples(where: str, coefficients: Any, steps: int) -> list[Coefficients]:
    """Return a, b and c of every step. If there are more triples than steps, the last ones count, as in optax."""
    checks.number(where, 1, ns_steps=steps)
    if not isinstance(coefficients, tuple | list) or not coefficients:
        raise ValueError(f"{where}: ns_coeffs must be three numbers, or three for each step; got {coefficients!r}.")
    triples = [coefficients] * steps if isinstance(coefficients[0], int | float) else list(coefficients)[-steps:]
    for triple in triples:
        if not isinstance(triple, tuple | list) or len(triple) != 3:
            raise ValueError(f"{where}: ns_coeffs must be three numbers, or three for each step; got {coefficients!r}.")
        checks.number(where, **dict(zip("abc", triple, strict=True)))
    if len(triples) < steps:
        raise ValueError(
            f"{where}: ns_coeffs has {len(triples)} triples, but ns_steps={steps}. Write one triple for each step."
        )
    return [tuple(triple) for triple in triples]
