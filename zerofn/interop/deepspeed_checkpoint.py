"""`zerofn.load_deepspeed`: a checkpoint of DeepSpeed's, at any ZeRO stage, into a state.

What DeepSpeed calls a checkpoint is a folder with one folder per tag, of torch.save's files: the model's from rank 0,
or from every rank at stage 3, and the optimizer's from every rank. At stages 1 and 2 a parameter group is one flat fp32
vector, cut into equal parts; at stage 3 every parameter is cut by itself, and a rank's parts follow each other. Masters
and moments have the same places. Files are mapped, and read by intervals. They are pickles: classes of DeepSpeed's own
are replaced by empty ones, and any other class is refused, so nothing of a file is ever executed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

import zerofn

from ..util.arguments import checked
from .adam_moments import MOMENTS, names_of, params_of, with_moments
from .tensor_pieces import Pieces, cut, first, numel
from .torch_files import Count, Each, FlatTensor, Named, Numbered, check_file, check_values

_LONGEST = 4096  # bytes of a folder's name
_SHAPES = Named(Each(Count))
_KINDS = tuple(f"{kind}?" for kind in MOMENTS)
_STATES = {"state": Numbered(dict.fromkeys(_KINDS, Tensor) | {"step?": (int, float, Tensor)})}
# What is read of a rank's model file, and of a rank's optimizer file; any may hold more.
_MODEL = {
    "module?": dict, "buffer_names?": Each(str), "optimizer?": dict, "param_shapes?": Each(_SHAPES),
    "frozen_param_shapes?": _SHAPES, "frozen_param_fragments?": dict, "shared_params?": Named(str),
    "global_steps?": Count, "skipped_steps?": Count,
}  # fmt: skip
_OPTIMIZER = {
    "base_optimizer_state?": _STATES, "optimizer_state_dict?": _STATES,
    "single_partition_of_fp32_groups?": Each(FlatTensor),
    "fp32_flat_groups?": Each(FlatTensor), "partition_count?": object, "param_alignment_paddings?": Each(Each(Count)),
}  # fmt: skip
_STAGE_0 = {"state?": Numbered(_STATES["state"].of), "param_groups?": Each({"params": Each(int)})}
_FP32 = {"single_partition_of_fp32_groups": "base_optimizer_state", "fp32_flat_groups": "optimizer_state_dict"}

T = TypeVar("T", bound="zerofn.TrainState")


@checked()
def load_deepspeed(path: str | Path, like: T, *, tag: str | None = None, only: str | None = None) -> T:
    """Return the state that DeepSpeed saved, with the layout of the `TrainState` `like`.

        state = zerofn.load_deepspeed("checkpoints/", like=state)

    `path`: the folder that was passed to `engine.save_checkpoint`. `tag`: which checkpoint in it; by default the one
    that the file `latest` names. Parameters are read from fp32 masters if the checkpoint has them. Adam's moments and
    step count go to the `AdamState` in `like.opt_state`, the engine's steps to `step` and `skipped`, and a dynamic loss
    scale to that of `like`. With `only="params"`, all other entries keep the values of `like`. The number of ranks
    may differ. Every rank must call it; each reads only the intervals that it needs. `like` is not changed.

    Names are the module's, as in `dict(module.named_parameters())`. A tied weight is one parameter; `like` may have it
    under any of its names.

    Raises `zerofn.CheckpointError` for files that are missing, damaged, of another model, of model parallelism, or that
    would execute code when they are read, and if `like` has no `AdamState` for the moments.
    """
    names = set(names_of(params_of("load_deepspeed", like)))

    @cache
    def opened() -> _Saved:
        return _Saved.at(_tag_folder(Path(path).expanduser(), tag))

    params = zerofn.load_state_dict(lambda: opened().chosen(opened().params, names), like=like.params)
    saved = opened()
    if only == "params":
        return dataclasses.replace(like, params=params)
    if only is not None:
        raise ValueError(f"load_deepspeed: only={only!r} is not known; expected 'params' or None.")

    def find(tree: Any, kind: str) -> Mapping[str, Any]:
        if saved.lacks_moments:
            raise zerofn.CheckpointError(f"load_deepspeed: {saved.lacks_moments} Pass only='params'.")
        return saved.chosen(saved.moments[kind], set(names_of(tree)))

    opt_state, _ = with_moments("load_deepspeed", saved.folder, like.opt_state, find, lambda _: saved.count)
    changes: dict[str, Any] = {"params": params, "opt_state": opt_state}
    changes["step"] = torch.full_like(like.step, saved.steps)
    changes["skipped"] = torch.full_like(like.skipped, saved.skipped)
    if saved.scale is not None and isinstance(like.loss_scale, zerofn.DynamicLossScale):
        scale = torch.full_like(like.loss_scale.loss_scale, saved.scale)
        changes["loss_scale"] = dataclasses.replace(like.loss_scale, loss_scale=scale)
    return dataclasses.replace(like, **changes)


def _tag_folder(path: Path, tag: str | None) -> Path:
    if tag is None and (path / "latest").is_file():
        with (path / "latest").open("rb") as opened:  # a folder's name, and no more of what may be any file
            tag = opened.read(_LONGEST).decode(errors="replace").strip()
    folder = path if tag is None else path / tag
    if tag is not None and (re.search(r"[/\\\0]", tag) or tag in ("", ".", "..")):
        raise zerofn.CheckpointError(
            f"load_deepspeed: {path / 'latest'} has {tag!r}, which is not the name of a folder."
        )
    if not folder.is_dir():
        raise zerofn.CheckpointError(
            f"load_deepspeed: {folder} does not exist. Pass the folder that contains the file `latest`."
        )
    return folder


@dataclass
class _Saved:
    """What is in one tag's folder. `aliases`: another name of a tied parameter -> its name."""

    folder: Path
    params: dict[str, Tensor | Pieces]
    moments: dict[str, dict[str, Tensor | Pieces]]
    aliases: dict[str, str]
    count: int
    steps: int
    skipped: int
    scale: float | None
    lacks_moments: str = ""

    @staticmethod
    def at(folder: Path) -> _Saved:
        """Read what is there."""
        models = _ranks(folder, re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt"))
        if not models:
            raise zerofn.CheckpointError(
                f"load_deepspeed: {folder} has no *_model_states.pt, so it is not a checkpoint of DeepSpeed's engine."
            )
        optims = _ranks(folder, re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"))
        model = _read(models[0], _MODEL)
        if not optims:
            return _plain(folder, model)
        return _zero(
            folder, [model, *(_read(file, _MODEL) for file in models[1:])], [_read(file, _OPTIMIZER) for file in optims]
        )

    def chosen(self, tensors: Mapping[str, Tensor | Pieces], names: set[str]) -> dict[str, Tensor | Pieces]:
        """Return tensors by the names that `like` has for tied ones."""
        own = dict(tensors)
        for alias, name in self.aliases.items():
            if alias in names and name not in names and name in own:
                own[alias] = own.pop(name)
        return own


def _ranks(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of a kind, by rank. Raises `zerofn.CheckpointError` for a gap, and for model parallelism."""
    found: dict[int, Path] = {}
    for file in folder.iterdir():
        if match := pattern.fullmatch(file.name):
            if int(match[2]):
                raise zerofn.CheckpointError(
                    f"load_deepspeed: {file} belongs to a model with tensor or pipeline parallelism. Convert the "
                    "checkpoint with DeepSpeed's ds_to_universal, or save it from a run without this parallelism."
                )
            found[int(match[1] or 0)] = file
    if sorted(found) != list(range(len(found))):
        gap = next(k for k in range(len(found)) if k not in found)
        raise zerofn.CheckpointError(f"load_deepspeed: {folder} has no file of rank {gap}. Copy the folder again.")
    return [found[k] for k in sorted(found)]


class _Empty:
    """In the place of a class of DeepSpeed's."""

    def __new__(cls, *args: Any) -> _Empty:
        return object.__new__(cls)


def _read(file: Path, shape: Mapping[str, Any]) -> Any:
    """Return what a file holds, its tensors mapped; of an optimizer's file what DeepSpeed puts below one key.

    Raises `zerofn.CheckpointError` for one that would execute code, that is larger in memory than it is, or whose
    values are not of this shape.
    """
    check_file(file, "load_deepspeed")
    try:
        named = get_unsafe_globals_in_checkpoint(file)
    except Exception as error:
        raise zerofn.CheckpointError(
            f"load_deepspeed: {file} is damaged, or was not written by torch.save: {error}"
        ) from error
    strange = [name for name in named if not name.startswith("deepspeed.")]
    if strange:
        raise zerofn.CheckpointError(
            f"load_deepspeed: {file} would call {strange[0]} when it is unpickled, so it is not read: a pickle can "
            "execute any code. If you trust the file, load it with DeepSpeed, and save the engine without client_state."
        )
    inert: list[Any] = [(type(name.rpartition(".")[2], (_Empty,), {}), name) for name in named]
    try:
        with safe_globals(inert):
            found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise zerofn.CheckpointError(f"load_deepspeed: {file} cannot be read: {error}") from error
    what = f"load_deepspeed: {file}"
    if shape is _OPTIMIZER:
        check_values(found, {"optimizer_state_dict": dict}, what)
        found = found["optimizer_state_dict"]
    check_values(found, shape, what)
    return found


def _plain(folder: Path, model: Mapping[str, Any]) -> _Saved:
    """A checkpoint of stage 0: the module's own tensors, and the optimizer's state by number."""
    buffers = set(model.get("buffer_names") or ())
    what = f"load_deepspeed: {folder}"
    check_values(model, {"module": Named(object)}, what)
    whole = {k: v for k, v in model["module"].items() if k not in buffers}
    check_values(whole, Named(Tensor), what, "module")
    aliases = _tied(whole)
    params: dict[str, Tensor | Pieces] = {k: v for k, v in whole.items() if k not in aliases}
    optimizer = model.get("optimizer") or {}
    check_values(optimizer, _STAGE_0, what, "optimizer")
    state, groups = optimizer.get("state") or {}, optimizer.get("param_groups") or []
    order = [i for group in groups for i in group["params"]]
    lacks, moments = "", {kind: dict[str, Tensor | Pieces]() for kind in MOMENTS}
    if len(groups) != 1 or len(order) != len(params) or not all(i in state for i in order):
        lacks = (
            f"{folder} was saved at stage 0, where DeepSpeed saves moments by number, not by name. Numbers can be "
            f"matched to names only if one group has all parameters; this checkpoint has {len(groups)} groups of "
            f"{len(order)} parameters, for {len(params)} tensors."
        )
    elif any(state[i].get(kind) is None for i in order for kind in MOMENTS):
        lacks = _not_adam(folder)
    else:
        for i, (name, x) in zip(order, params.items(), strict=True):
            for kind in MOMENTS:
                moments[kind][name] = state[i][kind]
                if state[i][kind].shape != x.shape:
                    lacks = f"{folder}: the order of the moments differs from the order of the module's parameters."
    return _Saved(folder, params, moments, aliases, _count(folder, state), *_steps(model), None, lacks)


def _not_adam(folder: Path) -> str:
    return f"{folder} has no {' and '.join(MOMENTS)}, so its optimizer is not Adam."


def _tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return other names of tensors that share their memory."""
    first_name: dict[tuple[int, tuple[int, ...]], str] = {}
    found = {}
    for name, x in tensors.items():
        key = (x.data_ptr(), tuple(x.shape))
        if x.numel() and first_name.setdefault(key, name) != name:
            found[name] = first_name[key]
    return found


def _zero(folder: Path, models: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> _Saved:
    """A checkpoint of stages 1 to 3."""
    model, world, what = models[0], len(ranks), f"load_deepspeed: {folder}"
    key = next((x for x in _FP32 if x in ranks[0]), None)
    counted = ranks[0].get("partition_count", world)
    each = counted if isinstance(counted, list | tuple) else [counted]
    if key is None or world not in each or any(not isinstance(x, int) or x > world for x in each):
        raise zerofn.CheckpointError(
            f"{what} has optimizer files of {world} ranks, but was saved by {counted}. Copy the folder again."
        )
    for rank in ranks:
        check_values(
            rank, {key: Each(FlatTensor), _FP32[key]: {"state": Numbered(dict.fromkeys(_KINDS, FlatTensor))}}, what
        )
    check_values(model, {"param_shapes": Each(_SHAPES)}, what)
    states = [rank[_FP32[key]]["state"] for rank in ranks]
    flats: dict[str, list[list[Tensor]]] = {"params": [rank[key] for rank in ranks]}  # kind -> rank -> group
    flats |= {kind: [_groups(state, kind) for state in states] for kind in MOMENTS}
    shapes, whole = model["param_shapes"], key == "fp32_flat_groups"
    paddings = ranks[0].get("param_alignment_paddings")
    placed = {
        kind: _by_parameter(shapes, found) if whole else _by_group(shapes, found, paddings, f"{what}: {kind}")
        for kind, found in flats.items()
        if all(found)
    }
    missing = "" if len(placed) == len(flats) else _not_adam(folder)
    params = placed.get("params", {}) | _frozen(models, whole, what)
    for kind, pieces in {**placed, "params": params}.items():
        for name, x in pieces.items():
            if isinstance(x, Pieces) and (lacking := x.lacking()):
                raise zerofn.CheckpointError(
                    f"{what}: {kind} of {name!r}: {lacking:,} of the {numel(x.shape):,} elements of a tensor of shape "
                    f"{x.shape} are missing. Copy all files again."
                )
    scale = _scale(ranks[0].get("loss_scaler"), what) if ranks[0].get("dynamic_loss_scale") else None
    moments = {kind: placed.get(kind, {}) for kind in MOMENTS}
    aliases = dict(model.get("shared_params") or {})
    return _Saved(folder, params, moments, aliases, _count(folder, states[0]), *_steps(model), scale, missing)


def _scale(scaler: Any, what: str) -> float:
    scale = getattr(scaler, "cur_scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < float("inf"):
        raise zerofn.CheckpointError(f"{what}: loss_scaler.cur_scale: expected a number above 0, got {scale!r}.")
    return float(scale)


def _groups(state: Mapping[int, Mapping[str, Any]], kind: str) -> list[Tensor]:
    return [x for k in sorted(state) if (x := state[k].get(kind)) is not None]


def _by_group(
    shapes: Sequence[Mapping[str, Sequence[int]]], ranks: Sequence[Sequence[Tensor]], paddings: Any, what: str
) -> dict[str, Tensor | Pieces]:
    """Stages 1 and 2: a group's parameters follow each other in a vector, which is cut over the ranks."""
    found: dict[str, Tensor | Pieces] = {}
    counts = {len(shapes), *map(len, ranks)}
    if len(counts) > 1:
        raise zerofn.CheckpointError(
            f"{what}: the files have different numbers of parameter groups, {sorted(counts)}. Copy all files again."
        )
    if paddings is not None and [len(x) for x in paddings] != [len(group) for group in shapes]:
        raise zerofn.CheckpointError(
            f"{what}: param_alignment_paddings do not have one number for each parameter. Copy all files again."
        )
    for g, group in enumerate(shapes):
        flats, at = [rank[g] for rank in ranks], 0
        for k, (name, shape) in enumerate(group.items()):
            found[name] = Pieces(tuple(shape), cut(flats, at, numel(shape)))
            at += numel(shape) + (paddings[g][k] if paddings is not None else 0)
    return found


def _by_parameter(
    shapes: Sequence[Mapping[str, Sequence[int]]], ranks: Sequence[Sequence[Tensor]]
) -> dict[str, Tensor | Pieces]:
    """Stage 3: every parameter is cut over the ranks, and a rank's parts of all groups follow each other."""
    found: dict[str, Tensor | Pieces] = {}
    at = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        part = -(-numel(shape) // len(ranks))
        parts = [piece for rank in ranks for piece in cut(rank, at, part)]
        found[name] = Pieces(tuple(shape), first(parts, numel(shape)))
        at += part
    return found


def _frozen(models: Sequence[Mapping[str, Any]], whole: bool, what: str) -> dict[str, Tensor | Pieces]:
    """What is not trained: cut over the ranks at stage 3, else in the module."""
    shapes = models[0].get("frozen_param_shapes") or {}
    if whole:
        fragments = dict.fromkeys(shapes, FlatTensor)
        for model in models if shapes else []:
            check_values(model, {"frozen_param_fragments": fragments}, what)
        return {
            name: Pieces(tuple(shape), first([x["frozen_param_fragments"][name] for x in models], numel(shape)))
            for name, shape in shapes.items()
        }
    learned = {name for group in models[0]["param_shapes"] for name in group}
    aside = {*learned, *(models[0].get("shared_params") or {}), *(models[0].get("buffer_names") or ())}
    frozen = {name: x for name, x in (models[0].get("module") or {}).items() if name not in aside}
    check_values(frozen, Named(Tensor), what, "module")
    return frozen


def _count(folder: Path, states: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the steps of the optimizer: the most of any parameter."""
    most = 0
    for number, x in states.items():
        step = x.get("step") or 0
        is_one = not isinstance(step, Tensor) or (step.numel() == 1 and not step.is_meta)
        value = float(step) if is_one else -1.0
        if not 0 <= value < 2**53:
            raise zerofn.CheckpointError(
                f"load_deepspeed: {folder}: the optimizer's state[{number}].step: expected a number of 0 or more, got "
                f"{step!r}."
            )
        most = max(most, int(value))
    return most


def _steps(model: Mapping[str, Any]) -> tuple[int, int]:
    return model.get("global_steps") or 0, model.get("skipped_steps") or 0
