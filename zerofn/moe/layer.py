"""A whole layer: gate, dispatch, experts, combine, and what else a gate is trained by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..comm.current_mesh import current_mesh
from ..comm.mesh import Axis, Mesh
from ..random import fold_in
from ..random.draws import fold_in_rank
from ..util.arguments import checked
from .draws import gumbel, jitter, uniform
from .exchange import combine, dispatch, experts_here
from .losses import load_balance_loss, z_loss
from .routing import Priority, Routing, route

_JITTER, _SAMPLE, _SELECT = range(3)  # what a key is folded with, for each use of it
_PARTS = {"gate", "experts", "mlp", "coefficient"}

Experts = Callable[[Any, Tensor], Tensor]


class Aux(NamedTuple):
    """Further results of a layer: 0-d tensors for this rank's tokens, and `counts` int64 [E].

    `balance`: the load-balance loss; add a small multiple of it to the loss. `z`: the z-loss. `counts`: the number of
    tokens that chose each expert. `dropped`: how many choices were dropped.

    >>> params = {"gate": torch.eye(2), "experts": {"w": torch.ones(2, 1, 1)}}
    >>> y, aux = layer(params, torch.eye(2), lambda p, rows: p["w"] * rows)
    >>> aux.counts, aux.dropped
    (tensor([1, 1]), tensor(0))
    """

    balance: Tensor
    z: Tensor
    counts: Tensor
    dropped: Tensor


@checked("params", "x", "min_capacity", "normalize", "used")
def layer(
    params: Mapping[str, Any],
    x: Tensor,
    experts: Experts,
    *,
    k: int = 1,
    capacity: float | None = 1.0,
    min_capacity: int = 4,
    priority: Priority | Literal["random"] = "choice",
    epsilon: float = 0.0,
    sample: Literal["all", "others"] | None = None,
    normalize: bool | None = None,
    balance: Literal["all", "first"] = "all",
    balance_axis: str | Axis | None = None,
    used: Tensor | None = None,
    axis: str | Axis | None = None,
    key: Tensor | None = None,
) -> tuple[Tensor, Aux]:
    """Return (y, aux): apply to every token of `x` its k experts.

    `params`: "gate", the weight [E, d]; "experts", a tree of tensors [E / size, ...]; and for residual experts (PR-MoE)
    "mlp", a tree like one expert's, and "coefficient", the "weight" [2, d] and "bias" [2] that mix both outputs. `x`
    [..., d]: this rank's tokens. `experts(params, rows)`: [E / size, n, d] -> [E / size, n, d'], usually `torch.vmap`
    of a function of one expert; empty rows are zeros. `axis`: see `dispatch`; all its ranks must call it, with equal
    shapes.

    `k`, `capacity`, `min_capacity`, `normalize`, `used` bool [...]: see `route`; `priority` also "random". `epsilon`:
    of `jitter` for the gate's input. `sample`: draw experts by their probabilities, "all" or the "others" after the
    first. All three draw from `key`, with this rank's part of the batch folded in; see `gumbel`. `balance`: which
    choices the load-balance loss counts, "all" or the "first"; `balance_axis`: see `load_balance_loss`.

    -> y [..., d'] in the dtype of the experts' output, and `Aux`. A pure function, differentiable to every order.
    Raises `ValueError` for shapes that do not fit, unknown words, and a missing key.

    >>> params = {"gate": torch.eye(2), "experts": {"w": torch.tensor([2.0, 3.0]).view(2, 1, 1)}}
    >>> layer(params, torch.eye(2) * 9, lambda p, rows: p["w"] * rows)[0].round()
    tensor([[18.,  0.],
            [ 0., 27.]])
    """
    _check(params, x, sample, balance)
    tokens, used = x.reshape(-1, x.shape[-1]), None if used is None else used.reshape(-1)
    keys = _keys(key)
    logits = _logits(params["gate"], tokens, epsilon, keys[_JITTER])
    found = route(
        logits,
        k,
        capacity=capacity,
        min_capacity=min_capacity,
        priority=uniform(keys[_SELECT], logits[:, :1].expand(-1, k).t()) if priority == "random" else priority,
        noise=gumbel(logits, keys[_SAMPLE]) if sample else None,
        noisy_first=sample != "others",
        normalize=normalize,
        used=used,
    )
    y = _through_experts(params["experts"], tokens, experts, found, axis)
    if "mlp" in params:
        y = residual(tokens, y, _through_one(params["mlp"], tokens, experts), params["coefficient"])
    chosen = found.expert[: 1 if balance == "first" else k]
    even = load_balance_loss(logits, chosen, used=used, axis=balance_axis)
    return y.view(*x.shape[:-1], y.shape[-1]), Aux(even, z_loss(logits), found.counts, found.dropped)


@checked()
def residual(x: Tensor, routed: Tensor, dense: Tensor, coefficient: Mapping[str, Tensor]) -> Tensor:
    """Mix the outputs of a token's experts and of the one that all tokens go through (Residual-MoE, PR-MoE).

    `x` [..., d]: the tokens. `routed`, `dense` [..., d']: the two outputs. `coefficient`: "weight" [2, d] and "bias"
    [2] of a linear layer, whose softmax weighs them in this order.

    -> [..., d'].

    >>> even = {"weight": torch.zeros(2, 1), "bias": torch.zeros(2)}
    >>> residual(torch.ones(1, 1), torch.tensor([[1.0]]), torch.tensor([[3.0]]), even)
    tensor([[2.]])
    """
    weights = torch.nn.functional.linear(x, coefficient["weight"], coefficient["bias"]).softmax(-1)
    return routed * weights[..., :1] + dense * weights[..., 1:]


def _through_experts(params: Any, tokens: Tensor, experts: Experts, found: Routing, axis: str | Axis | None) -> Tensor:
    here, size = experts_here(found.num_experts, axis, "moe.layer")
    paths, leaves, _ = tree.flatten_with_path(params)
    for path, leaf in zip(paths, leaves, strict=True):
        if not leaf.dim() or leaf.shape[0] != here:
            shared = f"; {size} ranks share {found.num_experts}" if size > 1 else ""
            raise ValueError(
                f"moe.layer: experts' {tree.name_of(path) or 'tensor'!r} has shape {list(leaf.shape)}, expected a "
                f"first dim of {here}, the number of experts on this rank{shared}. If the tensors hold all experts, "
                "write zerofn.moe.own(experts, axis)."
            )
    rows = dispatch(tokens, found, axis)
    y = experts(params, rows)
    if not isinstance(y, Tensor) or y.dim() != 3 or y.shape[:2] != rows.shape[:2]:
        got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"moe.layer: experts(params, rows) received rows {list(rows.shape)} and returned {got}, expected "
            f"[{rows.shape[0]}, {rows.shape[1]}, d]. If your function computes one expert, write torch.vmap(expert)."
        )
    return combine(y, found, axis)


def _through_one(params: Any, tokens: Tensor, experts: Experts) -> Tensor:
    """Return the output of one expert that all tokens go through."""
    return experts(tree.tree_map(lambda p: p.unsqueeze(0), params), tokens.unsqueeze(0)).squeeze(0)


def _logits(weight: Tensor, tokens: Tensor, epsilon: float, key: Tensor | None) -> Tensor:
    """Return the gate's logits [S, E], in float32 at least."""
    dtype = torch.promote_types(torch.promote_types(tokens.dtype, weight.dtype), torch.float32)
    into = tokens.to(dtype)
    if epsilon:
        into = jitter(into, key, epsilon)
    return torch.nn.functional.linear(into, weight.to(dtype))


def _keys(key: Tensor | None) -> Sequence[Tensor | None]:
    """Return a key for each kind of draw. Ranks with other tokens draw differently."""
    if key is None:
        return (None, None, None)
    own = fold_in_rank(key, (current_mesh() or Mesh.of(None)).batch.rank)
    return [fold_in(own, use) for use in (_JITTER, _SAMPLE, _SELECT)]


def _check(params: Mapping[str, Any], x: Tensor, sample: str | None, balance: str) -> None:
    """Raise `ValueError` for what does not fit."""
    found = set(params)
    if not {"gate", "experts"} <= found or found - _PARTS or ("mlp" in found) != ("coefficient" in found):
        raise ValueError(
            f"moe.layer: params has {sorted(found)}; expected 'gate' and 'experts', and for residual experts 'mlp' and "
            "'coefficient'."
        )
    weight = params["gate"]
    if not isinstance(weight, Tensor) or weight.dim() != 2 or x.dim() < 1 or weight.shape[1] != x.shape[-1]:
        shape = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(
            "moe.layer: the last dims of x [..., d] and params['gate'] [experts, d] must be equal; the "
            f"shapes are {list(x.shape)} and {shape}."
        )
    for what, value, known in (("sample", sample, (None, "all", "others")), ("balance", balance, ("all", "first"))):
        if value not in known:
            raise ValueError(
                f"moe.layer: {what}={value!r} is not known; expected one of {', '.join(map(repr, known))}."
            )
