"""A state laid out again: if other parameters are trained than before, parameters and moments are carried by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import zerofn

Key = tuple[type | None, str]  # of a tree of moments, or a count: the state that has it, and the name there
Find = Callable[[str], Any]  # a parameter's name -> the state from which its moments come, None: it has none


def relaid(
    state: Any, module: nn.Module, tx: Any, frozen: Callable[[str], bool] | None = None,
    moments: Callable[[Any], Any] = lambda new: new, **options: Any,
) -> Any:  # fmt: skip
    """Return a state with the parameters and counters of another, and with new moments, for `tx`, or what `moments`
    makes of these. What codes have left out of gradients stays, if the same leaves are trained. All ranks must call it.

    The parameters of `module`, which have the state's names, say by `requires_grad` which are trained. `options`: of
    `zerofn.shard`. At most one unit is gathered at a time; both states are there at the end.
    """
    given = dict(module.named_parameters())

    def create() -> Any:
        params = {
            name: nn.Parameter(torch.zeros(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
            for name, p in given.items()
        }
        return zerofn.TrainState.create(params=params, tx=tx, loss_scale=state.loss_scale, frozen=frozen)

    new = zerofn.shard(create, **options)
    params = copied(state.params, new.params, list(given))
    alike = zerofn.tree.structure(new.feedback) == zerofn.tree.structure(state.feedback)  # the same leaves are trained
    return dataclasses.replace(
        new, params=params, step=state.step, skipped=state.skipped, rng=state.rng, loss_scale=state.loss_scale,
        extra=state.extra, opt_state=moments(new.opt_state), feedback=state.feedback if alike else new.feedback,
    )  # fmt: skip


def carried(like: Any, names: list[str], find: Find) -> Any:
    """Return an optimizer's state laid out as `like`, with the moments and counts of these parameters, which have the
    same count, from those that `find` returns. All ranks must call it.

    Trees of moments are told by the type of the state that has them and their name in it: a chain may have other
    parts. What is not found stays as in `like`.
    """
    sources: dict[int, tuple[Any, list[str]]] = {}
    for name in names:
        source = find(name)
        if source is not None:
            sources.setdefault(id(source), (source, []))[1].append(name)
    for source, own in sources.values():
        theirs = dict(_parts(source, None, ""))
        like = _filled(like, theirs, own, None, "")
    return like


def _parts(x: Any, kind: type | None, field: str) -> Iterator[tuple[Key, Any]]:
    """Yield the trees and tensors in a state."""
    if _is_tree(x) or isinstance(x, Tensor):
        yield (kind, field), x
    elif hasattr(x, "_fields"):
        for name, part in zip(x._fields, x, strict=True):
            yield from _parts(part, type(x), name)
    elif isinstance(x, tuple):
        for part in x:
            yield from _parts(part, kind, field)


def _filled(x: Any, theirs: Mapping[Key, Any], names: list[str], kind: type | None, field: str) -> Any:
    if _is_tree(x) or isinstance(x, Tensor):
        found = theirs.get((kind, field))
        if found is None:
            return x
        if isinstance(x, Tensor):
            return found.to(x.device, x.dtype, copy=True)
        return copied(found, x, names)
    if hasattr(x, "_fields"):
        return type(x)(*(_filled(p, theirs, names, type(x), n) for n, p in zip(x._fields, x, strict=True)))
    if isinstance(x, tuple):
        return tuple(_filled(p, theirs, names, kind, field) for p in x)
    return x


def _is_tree(x: Any) -> bool:
    return isinstance(x, zerofn.Sharded | dict)


def copied(source: Any, like: Any, names: list[str]) -> Any:
    """Return `like` with the leaves of these names from `source`, unit by unit. All ranks must call it."""
    units = (
        [[leaf.name for leaf in unit.leaves] for unit in like.layout.units] if not isinstance(like, dict) else [names]
    )
    wanted = set(names)
    for unit in units:
        own = {name: None for name in unit if name in wanted}  # in one order on all ranks
        if own:
            found = zerofn.unshard(source, only=own.__contains__)
            there = {name: found[name] for name in own if found.get(name) is not None}
            like = zerofn.load_state_dict(there, like=like, strict=False, donate=True)
    return like
