"""A Lightning checkpoint: a file with the weights as Lightning's, and beside it a folder with the state."""

from __future__ import annotations

import dataclasses
import mmap
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import set_default_mmap_options

import zerofn

from ...interop.adam_moments import with_moments as place
from ..live_module import LiveParameter

_MARK = "zerofn: a parameter of the state"
_OF_TRAINING = ("callbacks", "optimizer_states", "lr_schedulers")  # what Lightning leaves out of a file of weights


class Rest(dict[str, Any]):
    """Of a state dict, what is not in the state already."""


def beside(path: Any) -> Path:
    """Return the folder with the state that belongs to Lightning's file, which may be a link."""
    found = Path(path).resolve()
    return found.with_name(f"{found.name}.zerofn")


def save(folder: Path, state: Any, kept: dict[str, Any], io: Any, writes: bool) -> None:
    """Write the state to a folder, and on the rank that `writes` what Lightning keeps.

    That file has the state's step in its name. Where there is a checkpoint already, it is written before the state
    is: a process that is killed leaves two that belong together.
    """
    mine = folder / _name(state)
    first = writes and folder.is_dir()

    def write() -> None:
        io.save_checkpoint(_mapped(kept, lambda x, _: (_MARK, name) if (name := _name_of(x)) else x), mine)

    if first:
        write()
    zerofn.save(folder, state)
    if writes and not first:
        write()
    if writes:
        for old in folder.glob("lightning-*.ckpt"):
            if old != mine:
                old.unlink()


def save_weights(path: Path, kept: dict[str, Any], params: Any, writes: bool) -> None:
    """Write Lightning's file, in which the module's parameters are plain tensors. At most one unit is gathered at a
    time; they are written into the file where it has places for them.
    """
    places: list[tuple[tuple[Any, ...], str]] = []

    def empty(x: Any, where: tuple[Any, ...]) -> Any:
        name = _name_of(x)
        if name is None:
            return x
        places.append((where, name))
        return torch.empty(x.shape, dtype=x.dtype)

    made = path.with_name(f"{path.name}.part")
    filled = _mapped({k: v for k, v in kept.items() if k not in _OF_TRAINING}, empty)
    found: Any = None
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(filled, made)
        with set_default_mmap_options(mmap.MAP_SHARED):
            found = torch.load(made, mmap=True, weights_only=False, map_location="cpu")
    del filled
    wanted = {name for _, name in places}
    for unit in params.layout.units:
        own = {leaf.name: None for leaf in unit.leaves if leaf.name in wanted}
        if own:
            values = zerofn.unshard(params, rank=0, only=own.__contains__)
            for where, name in places if writes else ():
                if name in own:
                    _at(found, where).copy_(values[name])
    if writes:
        del found
        made.replace(path)


def load(folder: Path, like: Any, io: Any, weights_only: bool | None, whole: bool) -> tuple[Any, dict[str, Any]]:
    """Return (the state of a folder, what Lightning keeps there). Without `whole` parameters and buffers alone.

    Of the state dict there, what hooks have put in the place of the module's parameters is left.
    """
    stepped = zerofn.load(folder, like, only="step")
    kept = folder / _name(stepped)
    if not kept.is_file():
        raise zerofn.CheckpointError(
            f"{folder} has a state of step {int(stepped.step)}, but no file {kept.name!r}, in which Lightning stores "
            "the position in the data and the state of its callbacks. Either this checkpoint was not saved by "
            "ZeroFnStrategy, or the file was removed. To use its parameters alone, write "
            f"zerofn.load({str(folder)!r}, like=state, only='params')."
        )
    found = {"state_dict": {}, **io.load_checkpoint(kept, weights_only=weights_only)}
    if whole:
        state = zerofn.load(folder, like, donate=True)
    else:
        state = zerofn.load(folder, like, only="params")
        state = state if like.extra is None else zerofn.load(folder, state, only="extra")
    own = found["state_dict"]
    if any(map(_is_mark, own.values())):
        found["state_dict"] = Rest({k: x for k, x in own.items() if not _is_mark(x)})
    names: set[str] = set()
    _mapped(found, lambda x, _: names.add(x[1]) if _is_mark(x) else x)
    values = zerofn.unshard(state.params, only=names.__contains__) if names else {}
    rest = found.pop("state_dict")
    return state, {**_mapped(found, lambda x, _: values[x[1]] if _is_mark(x) else x), "state_dict": rest}


def _name(state: Any) -> str:
    return f"lightning-{int(state.step)}.ckpt"


def _name_of(x: Any) -> str | None:
    """Return the name of one of the state's parameters."""
    return x.name if isinstance(x, LiveParameter) else None


def _is_mark(x: Any) -> bool:
    return type(x) is tuple and len(x) == 2 and x[0] == _MARK


def _mapped(x: Any, change: Callable[[Any, tuple[Any, ...]], Any], where: tuple[Any, ...] = ()) -> Any:
    """Return what a checkpoint has, with `change(leaf, its place)` in place of tensors and other leaves."""
    if isinstance(x, dict) and type(x) in (dict, OrderedDict):
        return {k: _mapped(v, change, (*where, k)) for k, v in x.items()}
    if type(x) in (list, tuple) and not _is_mark(x):
        return type(x)(_mapped(v, change, (*where, k)) for k, v in enumerate(x))
    return change(x, where)


def _at(x: Any, where: tuple[Any, ...]) -> Any:
    for key in where:
        x = x[key]
    return x


def with_state_dict(state: Any, tensors: Mapping[str, Tensor], strict: bool) -> Any:
    """Return the state with parameters and buffers from a state dict."""
    named = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    buffers = dict(state.extra or {})
    inner = {name: x for name, x in named.items() if name not in buffers}
    params = zerofn.load_state_dict(inner, like=state.params, strict=strict) if inner or strict else state.params
    fresh = {name: named[name].to(x.device, x.dtype) if name in named else x for name, x in buffers.items()}
    return dataclasses.replace(state, params=params, extra=fresh or None)


def with_moments(state: Any, theirs: Mapping[int, Mapping[str, Any]], order: Sequence[str]) -> Any:
    """Return the state with Adam's moments from one of torch's optimizers, whose parameters are `order`."""
    by_name = {order[k]: x for k, x in theirs.items()}

    def find(tree: Any, kind: str) -> dict[str, Tensor]:
        return {name: x[kind] for name, x in by_name.items() if kind in x}

    def count(tree: Any) -> int:
        return int(next(iter(by_name.values()))["step"])

    opt_state, steps = place("ZeroFnStrategy", "the checkpoint", state.opt_state, find, count)
    return dataclasses.replace(state, opt_state=opt_state, step=torch.full_like(state.step, steps))
