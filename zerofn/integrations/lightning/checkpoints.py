"""A Lightning checkpoint as a folder: ZeroFn's state, and beside it what Lightning keeps of loops and callbacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerofn

from ...interop.adam import with_moments as place


def save(path: Path, state: Any, kept: dict[str, Any], io: Any, writes: bool) -> None:
    """Write the state to the folder `path`, and on the rank that `writes` what Lightning keeps.

    That file has the state's step in its name. Where there is a checkpoint already, it is written before the state
    is: a process that is killed leaves two that belong together.
    """
    mine = path / _name(state)
    if writes and path.is_file():
        path.unlink()  # of weights only
    first = writes and path.is_dir()

    def write() -> None:
        io.save_checkpoint({k: v for k, v in kept.items() if k != "state_dict"}, mine)

    if first:
        write()
    zerofn.save(path, state)
    if writes and not first:
        write()
    if writes:
        for old in path.glob("lightning-*.ckpt"):
            if old != mine:
                old.unlink()


def load(path: Path, like: Any, io: Any, weights_only: bool | None, whole: bool) -> tuple[Any, dict[str, Any]]:
    """Return (the state of a folder, what Lightning keeps there). Without `whole` parameters and buffers alone."""
    stepped = zerofn.load(path, like, only="step")
    kept = path / _name(stepped)
    if not kept.is_file():
        raise zerofn.CheckpointError(
            f"{path} has a state of step {int(stepped.step)}, and no file {kept.name!r}, in which Lightning keeps the "
            "place in the data and its callbacks; it was not saved by ZeroFnStrategy, or the file was removed."
        )
    found = {"state_dict": {}, **io.load_checkpoint(kept, weights_only=weights_only)}
    if whole:
        return zerofn.load(path, like, donate=True), found
    state = zerofn.load(path, like, only="params")
    return (state if like.extra is None else zerofn.load(path, state, only="extra")), found


def _name(state: Any) -> str:
    return f"lightning-{int(state.step)}.ckpt"


def state_dict_of(module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a module's state dict, with values from elsewhere: as it would be on one process."""
    values = {**params, **buffers}
    first = {id(x): name for name, x in module.named_parameters()}
    names = {name: first.get(id(x), name) for name, x in module.state_dict(keep_vars=True).items()}
    return {name: values[source].detach().cpu() for name, source in names.items()}


def with_state_dict(state: Any, tensors: Mapping[str, Tensor], strict: bool) -> Any:
    """Return the state with parameters and buffers from a state dict."""
    named = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    buffers = dict(state.extra or {})
    inner = {name: x for name, x in named.items() if name not in buffers}
    params = zerofn.load_state_dict(inner, like=state.params, strict=strict)
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
