"""`zerofn.load_dcp` and `zerofn.export_dcp`: torch's distributed checkpoints, which FSDP2 and torchtitan write."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import zerofn

from ..util.arguments import checked
from .adam_moments import names_of, params_of, with_moments

T = TypeVar("T", bound="zerofn.TrainState")


@checked()
def load_dcp(path: str | Path, like: T, *, only: str | None = None) -> T:
    """Return the state that `torch.distributed.checkpoint` saved, with the layout of the `TrainState` `like`.

    Parameters are found by their names in `like.params`, with any prefix (such as "model."), and Adam's `exp_avg`,
    `exp_avg_sq` and `step` by the same names with another prefix, as torch's `get_state_dict` writes them. With
    `only="params"`, all other entries keep the values of `like`; otherwise the state's `step` is set to the optimizer's
    step count. The numbers of ranks may differ, and DTensors may be sharded in any way. Every rank must call it; in
    addition to the result, one tensor is in memory at a time. `like` is not changed.

    Raises `zerofn.CheckpointError` if the folder is not such a checkpoint, is damaged or of another model, if its
    metadata, a pickle, names anything but torch's classes for checkpoints, or if `like` has no `AdamState`.

    >>> import tempfile, torch, zerofn
    >>> state = zerofn.TrainState.create(params={"w": torch.ones(2)}, tx=zerofn.optim.adam(0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = zerofn.save(f"{folder}/step-1", state)
    ...     zerofn.export_dcp(f"{folder}/step-1", f"{folder}/dcp")
    ...     load_dcp(f"{folder}/dcp", like=state).params
    {'w': tensor([1., 1.])}
    """
    names = names_of(params_of("load_dcp", like))
    from .dcp_files import Saved  # which imports much of torch

    @cache
    def saved() -> Saved:
        return Saved(Path(path).expanduser())

    params = zerofn.load_state_dict(lambda: saved().below(saved().prefix(names, ""), names, ""), like=like.params)
    if only == "params":
        return dataclasses.replace(like, params=params)
    if only is not None:
        raise ValueError(f"load_dcp: only={only!r} is not known; expected 'params' or None.")

    def find(tree: Any, kind: str) -> Mapping[str, Any]:
        learned = names_of(tree)
        return saved().below(saved().prefix(learned, ".exp_avg"), learned, f".{kind}")

    def steps(tree: Any) -> int:
        learned = names_of(tree)
        return saved().step(saved().prefix(learned, ".exp_avg"), learned[0])

    opt_state, count = with_moments("load_dcp", path, like.opt_state, find, steps)
    return dataclasses.replace(like, params=params, opt_state=opt_state, step=torch.full_like(like.step, count))


@checked()
def export_dcp(path: str | Path, out: str | Path) -> None:
    """Write a ZeroFn checkpoint as one of `torch.distributed.checkpoint`, which FSDP2 and torchtitan load.

    It holds {"model": {name: tensor}} and, for Adam, {"optim": {"state": {name: {"exp_avg", "exp_avg_sq", "step"}}}},
    with the names of torch's `get_state_dict`. Values stay as stored. Call it in one process; files are mapped, not
    loaded. While it runs, it also writes a temporary copy beside `out`, so the drive needs free space for twice the
    result.

    Raises `zerofn.CheckpointError` for a checkpoint that cannot be read or has no `params`.

    >>> import tempfile, torch, zerofn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = zerofn.save(f"{folder}/step-1", {"params": {"w": torch.ones(2)}})
    ...     export_dcp(f"{folder}/step-1", f"{folder}/dcp")
    ...     sorted(x.name for x in Path(folder, "dcp").iterdir())
    ['.metadata', '__0_0.distcp']
    """
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open

    from .dcp_files import alone, failing

    target = Path(out).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        (file,) = zerofn.export(path, Path(folder) / "all.safetensors", part="")
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        model = {name.removeprefix("params."): x for name, x in tensors.items() if name.startswith("params.")}
        if not model:
            raise zerofn.CheckpointError(f"export_dcp: {path} has no entry 'params'.")
        state = _moments(tensors)
        with failing(f"export_dcp: {target} cannot be written"), alone():
            dcp.save(
                {"model": model} | ({"optim": {"state": state}} if state else {}), checkpoint_id=target, no_dist=True
            )


def _moments(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return Adam's state by parameter, as torch names it; nothing if there is not one such state."""
    found = [re.fullmatch(r"(opt_state\.(?:.*\.)?)mu\..+", name) for name in tensors]
    prefixes = {x[1] for x in found if x and f"{x[1]}count" in tensors}
    if len(prefixes) != 1:
        return {}
    prefix = prefixes.pop()
    step = tensors[f"{prefix}count"].float()
    return {
        name: {"exp_avg": x, "exp_avg_sq": tensors[f"{prefix}nu.{name}"], "step": step.clone()}
        for full, x in tensors.items()
        if full.startswith(f"{prefix}mu.") and (name := full.removeprefix(f"{prefix}mu."))
    }
