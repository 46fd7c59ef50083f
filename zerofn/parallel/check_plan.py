"""A test of tensor-parallel plans: does a transformers model with slices compute the same as the whole model?

We build a small model of the same class (`small_twin.py`), and run its ranks one after the other in this process.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..collectives.over_ranks import rows_over
from ..comm.mesh import Axis, Mesh
from ..geometry.cuts import Cut, sliced
from ..util.patterns import matches, pattern_of
from ..util.process import the
from .heads import Attributes
from .local_ranks import mesh_of, on_ranks, without_modes
from .small_twin import LIMIT, NoTwin, difference, few_ranks, inputs_of, other_gradient, outputs_of, small_twin

log = logging.getLogger("zerofn")


class _Found(NamedTuple):
    outs: list[Tensor]
    grads: dict[str, Tensor]
    returned: dict[str, Tensor]  # by a module, when it was called first; in the order in which modules end


class _Right:
    """Plans that have passed the test before, since a planner asks for many meshes of one model."""

    def __init__(self) -> None:
        self.plans: set[Any] = set()


def check_plan(
    model: Any, axis: Axis, plan: Mapping[str, Any], attributes: Attributes | None, cut: Callable[..., dict[str, Cut]]
) -> None:
    """Raise `ValueError` if a model that is sliced by a plan computes different values from the whole model.

    `cut`: `tensor`, which lets a model compute with a rank's slices. If no small twin can be made, nothing is tested,
    and the log says so.
    """
    name = type(model).__name__
    try:
        text = model.config.to_json_string(use_diff=False) if hasattr(model, "config") else ""
        key = None if attributes else (type(model), text, few_ranks(axis.size), repr(sorted(plan.items(), key=str)))
        if key in the(_Right).plans:
            return
        wrong = _wrong(model, axis.name, few_ranks(axis.size), plan, partial(cut, plan=plan, attributes=attributes))
    except Exception as error:  # what raises in a small twin raises in the model, too, or is the twin's fault
        log.log(
            logging.WARNING if hasattr(model, "config") else logging.INFO,
            "tensor: the plan for %s was not tested on a small model (%s). Compare the loss on a mesh with the loss on "
            "one process.",
            name,
            error if isinstance(error, NoTwin) else f"{type(error).__name__}: {error}",
        )
        return
    if wrong:
        raise ValueError(f"tensor: sliced by this plan, {name} computes different values: {wrong}")
    if key is not None:
        the(_Right).plans.add(key)


@without_modes()
def _wrong(
    model: Any, axis: str, parts: int, plan: Mapping[str, Any], cut: Callable[[nn.Module, Mesh], Mapping[str, Cut]]
) -> str:
    """Return how a sliced model differs from the whole one, or an empty text."""
    twin = small_twin(model, parts, partial(_entries_of, plan))
    inputs = inputs_of(twin, 8 * parts)
    (whole,) = on_ranks(1, lambda _: _run(copy.deepcopy(twin), inputs))
    if not all(x.isfinite().all() for x in whole.outs):
        raise NoTwin("the small model's outputs have NaN or inf")
    meshes = [mesh_of(axis, parts, rank) for rank in range(parts)]
    models = [copy.deepcopy(twin) for _ in meshes]
    cuts = [cut(one, mesh) for one, mesh in zip(models, meshes, strict=True)]
    for copied, own, mesh in zip(models, cuts, meshes, strict=True):
        for name, x in copied.named_parameters():
            x.data = _slice(x.data, name, own, mesh)
    found = on_ranks(parts, lambda rank: _run(models[rank], inputs, whole.outs, meshes[rank].axis(axis)))
    off = max(_off(x, [one.outs[k] for one in found]) for k, x in enumerate(whole.outs))
    if not off <= LIMIT:
        return (
            f"in a small model its outputs are off by {off:.1g} of the largest{_where(whole, found)}. Between sliced "
            "layers, every operation must treat heads or features separately, with the number of them that a rank "
            'has (docs/mesh.md, "What may stand between"). Give these layers other words, or leave them whole.'
        )
    for one, own, mesh in zip(found, cuts, meshes, strict=True):
        expected = {name: _slice(x, name, own, mesh) for name, x in whole.grads.items()}
        if other := other_gradient(expected, one.grads):
            return f"in a small model it has a different gradient of {other}.{_advice(other, own)}"
    return ""


def _entries_of(plan: Iterable[str], name: str) -> list[str]:
    """Return the keys of a plan that match a module, or a parameter of the module itself."""
    return [key for key in plan if matches(key, name) or matches(key.rpartition(".")[0], name)]


def _slice(x: Tensor, name: str, cuts: Mapping[str, Cut], mesh: Mesh) -> Tensor:
    return sliced(x, [cuts[name]] if name in cuts else [], mesh).clone()


def _run(
    model: nn.Module, inputs: Mapping[str, Tensor], like: list[Tensor] | None = None, axis: Axis | None = None
) -> _Found:
    """Run a twin and differentiate it. `like`: outputs of the whole one, of which ranks of `axis` may have parts."""
    returned: dict[str, Tensor] = {}
    hooks = [part.register_forward_hook(partial(_note, returned, name)) for name, part in model.named_modules()]
    try:
        outs = outputs_of(model(**inputs))
    finally:
        for hook in hooks:
            hook.remove()
    numbers, total = torch.Generator().manual_seed(3), torch.zeros((), dtype=torch.float64)
    for x, whole in zip(outs, like or outs, strict=True):
        weights = torch.randn(whole.shape, generator=numbers, dtype=torch.float64)
        if axis is not None and x.shape != whole.shape:
            sizes = rows_over(torch.tensor([x.shape[-1]]), axis).flatten().tolist()
            weights = weights.split(sizes, -1)[axis.rank]
        total = total + (x * weights).sum()
    names, params = zip(*((n, x) for n, x in model.named_parameters() if x.requires_grad), strict=True)
    grads = torch.autograd.grad(total, params, allow_unused=True)
    found = {n: x.new_zeros(x.shape) if g is None else g for n, x, g in zip(names, params, grads, strict=True)}
    return _Found([x.detach() for x in outs], found, returned)


def _note(returned: dict[str, Tensor], name: str, part: nn.Module, args: Any, out: Any) -> None:
    if name and name not in returned and (found := outputs_of(out)):
        returned[name] = found[0].detach().clone()


def _off(whole: Tensor, parts: list[Tensor]) -> float:
    """Return how much ranks' outputs differ from the whole output, of which each rank has all, or a slice of the last
    dim.
    """
    each = parts if parts[0].shape == whole.shape else [torch.cat(parts, -1)]
    return max(difference(x, whole) for x in each)


def _where(whole: _Found, found: list[_Found]) -> str:
    """Return the first module whose output every rank has whole, but with other values."""
    for name, x in whole.returned.items():
        others = [one.returned[name] for one in found if name in one.returned]
        if any(y.shape == x.shape and not difference(y, x) <= LIMIT for y in others):
            return f", and {name!r} is the first module that returns something else"
    return ""


def _advice(other: str, cuts: Mapping[str, Cut]) -> str:
    name = other.partition(",")[0]
    if name in cuts:
        return ""
    module = pattern_of(name.rpartition(".")[0])
    return (
        f" If it is used between layers that are cut, write {module!r}: 'replicated_with_grad_allreduce' into the plan."
    )
