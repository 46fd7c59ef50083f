"""`zerofn.from_deepspeed`: a DeepSpeed configuration as arguments of ZeroFn."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import zerofn

from ..util.arguments import checked
from .deepspeed_file import BATCH, Section, check_keys, filled, read, shown
from .deepspeed_keys import flat, row_of, turned_off
from .deepspeed_optimizers import clipped, optimizer_of

_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "fp16": torch.float16, "float16": torch.float16,
    "half": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip
_PATTERNS = ("fixed", "dense", "variable", "bigbird", "bslongformer", "local_sliding_window")


@dataclass(frozen=True)
class Setup:
    """What a DeepSpeed configuration becomes.

    `shard`: arguments of `zerofn.shard`. `compile`: arguments of `zerofn.compile`. `tx`: the optimizer, after
    gradient clipping. `schedule`: its learning rate, a float or a schedule. `loss_scale`: for
    `TrainState.create`, None without fp16. `num_microbatches`: for `zerofn.accumulate`. `rows`: of one rank's batch,
    all microbatches together; None if the configuration does not say. `on_nonfinite`: for `apply_gradients`.
    `cast_batch`: the dtype to which floating-point tensors of the batch are to be cast, or None. `sparse_attention`: a
    pattern for `zerofn.sparse.attention`, or None.
    """

    shard: dict[str, Any] = field(default_factory=dict)
    compile: dict[str, Any] = field(default_factory=dict)
    tx: Any = None
    schedule: Any = None
    loss_scale: Any = None
    num_microbatches: int = 1
    rows: int | None = None
    on_nonfinite: str = "skip"
    cast_batch: torch.dtype | None = None
    sparse_attention: zerofn.sparse.Pattern | None = None


@checked("auto", "mask", "world")
def from_deepspeed(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    auto: Mapping[str, Any] | None = None,
    tx: Any = None,
    mask: Callable[[Any], Any] | None = None,
    world: int | None = None,
) -> Setup:
    """Translate a DeepSpeed configuration into arguments of ZeroFn.

        setup = zerofn.from_deepspeed("ds_config.json", auto={"lr": 3e-4})
        state = zerofn.shard(lambda: zerofn.TrainState.create(params=..., tx=setup.tx, loss_scale=setup.loss_scale),
                             **setup.shard)
        step = zerofn.compile(train_step, **setup.compile)

    `config`: the file, or its content as a dict. `auto`: values for `"auto"`, by key, such as "optimizer.params.lr", or
    by its last word, such as "lr"; batch sizes, and keys without effect here, may stay "auto". `tx`: your own
    optimizer, if the configuration has none. `mask`: which leaves decay, in place of groups of parameters:
    `mask=lambda leaf: leaf.ndim >= 2` leaves biases and norms out. `world`: number of ranks; by default that of this
    job.

    `zerofn config ds_config.json` prints for every key what replaces it, and why. Raises `ValueError` for an unknown
    key, an `"auto"` without a value, a batch size that is not rows x microbatches x ranks, and a key without a
    counterpart; `FileNotFoundError` if the file does not exist.

    >>> config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    >>> from_deepspeed(config, tx=zerofn.optim.sgd(0.1)).shard
    {'stage': 2, 'precision': 'bf16'}
    """
    if world is not None and world < 1:
        raise ValueError(f"from_deepspeed: world must be a number of ranks of 1 or more, got {world!r}.")
    given = filled(read(config), auto or {})
    check_keys(given)
    _check_refused(given)
    if isinstance(given.get("zero_optimization"), bool):  # the oldest form
        given["zero_optimization"] = {"stage": int(given["zero_optimization"])}
    top = Section(given, "")
    rows, num_microbatches = _batch(top, _ranks() if world is None else world)
    bf16, fp16 = top("bf16" if "bf16" in given else "bfloat16"), top("fp16")
    moments: Any = "bf16" if bf16.flag("bf16_optimizer_states") else None
    tx, schedule = _optimizer(top, moments, tx, mask)
    tx = clipped(tx, top.number("gradient_clipping", 1.0, 0.0))
    offload = _offload(top("zero_optimization"))
    stage = _stage(top("zero_optimization"))
    return Setup(
        shard={"stage": stage, "precision": _precision(top, bf16, fp16), **({"offload": offload} if offload else {})},
        compile=_remat(top("activation_checkpointing")),
        tx=tx,
        schedule=schedule,
        loss_scale=_loss_scale(fp16),
        num_microbatches=num_microbatches,
        rows=rows,
        on_nonfinite="skip" if not bf16.flag("enabled") or bf16.flag("check_grad_overflow", True) else "ignore",
        cast_batch=torch.float16 if fp16.flag("enabled") and fp16.flag("auto_cast") else None,
        sparse_attention=_sparse(top),
    )


def _optimizer(top: Section, moments: Any, tx: Any, mask: Any) -> tuple[Any, Any]:
    """Return (transformation, schedule) of the configuration, or one's own and None."""
    if tx is None:
        return optimizer_of(top, moments, mask)
    if "optimizer" in top.values or "scheduler" in top.values:
        raise ValueError(
            "from_deepspeed: the configuration has an optimizer, which tx= would replace. Leave one of them out."
        )
    if mask is not None:
        raise ValueError(
            "from_deepspeed: mask= is for the optimizer of the configuration, but tx= was passed. Write the mask "
            "there: tx=optim.adamw(3e-4, mask=...)."
        )
    return tx, None


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _check_refused(config: Mapping[str, Any]) -> None:
    for key, value in flat(config):
        row = row_of(key)
        if row is not None and row.fate == "refused" and not turned_off(row, key, value, config):
            raise ValueError(f"from_deepspeed: {key}={shown(value)} has no counterpart. {row.what}")


def _batch(top: Section, world: int) -> tuple[int | None, int]:
    """Return (rows of one rank's batch, microbatches)."""
    whole, rows, steps = (top.number(name, None, 1, whole=True) for name in BATCH)
    if whole is None and rows is None:
        return None, steps or 1
    if rows is None:
        steps = steps or 1
        rows, left = divmod(whole, steps * world)
    elif steps is None:
        steps, left = divmod(whole, rows * world) if whole is not None else (1, 0)
    else:
        left = 0 if whole is None else whole - rows * steps * world
    if left or not rows or not steps:
        said = ", ".join(f"{name}={top.values[name]}" for name in BATCH if top.values.get(name) is not None)
        raise ValueError(
            "from_deepspeed: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks "
            f"cannot hold with {said} on {world} ranks. Leave one of the three out: it follows from the other two."
        )
    return rows * steps, steps


def _stage(zero: Section) -> int:
    stage = zero.number("stage", 0, 0, whole=True)
    if stage > 3:
        raise ValueError(f"from_deepspeed: zero_optimization.stage: expected 0, 1, 2 or 3, got {stage!r}.")
    return int(stage)


def _precision(top: Section, bf16: Section, fp16: Section) -> Any:
    """Return a name or a `Precision`: both dtypes at once, and two dtypes for one thing, are errors."""
    types = top("data_types")
    if bf16.flag("enabled") and fp16.flag("enabled"):
        raise ValueError("from_deepspeed: bf16.enabled and fp16.enabled are both true. Choose one.")
    name = "bf16" if bf16.flag("enabled") else "fp16" if fp16.flag("enabled") else "fp32"
    compute = types.word("param_dtype", _DTYPES, _DTYPES[name])
    if compute is not _DTYPES[name]:
        raise ValueError(
            f"from_deepspeed: data_types.param_dtype is {compute}, but the precision is {name}. Make them equal."
        )
    reduces = {
        key: dtype
        for key, dtype in (
            ("communication_data_type", top.word("communication_data_type", _DTYPES)),
            ("data_types.grad_accum_dtype", types.word("grad_accum_dtype", _DTYPES)),
        )
        if dtype is not None
    }
    if len(set(reduces.values())) > 1:
        raise ValueError(
            f"from_deepspeed: {' and '.join(f'{key}={dtype}' for key, dtype in reduces.items())}: here gradients are "
            "accumulated in the dtype in which they are reduced. Make the two equal."
        )
    reduce = next(iter(reduces.values()), None)
    low = name != "fp32" and (bf16 if name == "bf16" else fp16).flag(f"{name}_master_weights_and_grads")
    if low:
        return zerofn.Precision(compute, compute, reduce or compute)
    return name if reduce in (None, torch.float32) else zerofn.Precision(torch.float32, compute, reduce)


def _loss_scale(fp16: Section) -> Any:
    if not fp16.flag("enabled"):
        return None
    fixed = fp16.number("loss_scale", 0.0, 0.0)
    if fixed:
        return zerofn.StaticLossScale(fixed)
    return zerofn.DynamicLossScale(
        2.0 ** fp16.number("initial_scale_power", 16, 0, whole=True),
        period=fp16.number("loss_scale_window", 1000, 1, whole=True),
        min_loss_scale=fp16.number("min_loss_scale", 1, 0.0),
        hysteresis=fp16.number("hysteresis", 2, 1, whole=True),
    )


def _sparse(top: Section) -> zerofn.sparse.Pattern | None:
    """Return the pattern that a configuration asks for: an empty block asks for DeepSpeed's default pattern."""
    if top.values.get("sparse_attention") is None:
        return None
    block = top("sparse_attention")
    mode = block.word("mode", _PATTERNS, "fixed")
    make = getattr(zerofn.sparse.deepspeed, mode)
    names = inspect.signature(make).parameters
    given = {name: x for name, x in block.values.items() if name != "mode" and x is not None}
    for name in given.keys() - names:
        raise ValueError(f"from_deepspeed: sparse_attention.{name} has no effect with mode {mode!r}. Leave it out.")
    if mode == "bigbird":
        given.setdefault("num_random_blocks", 0)  # the default of a configuration; that of DeepSpeed's class is 1
    pattern: zerofn.sparse.Pattern = make(**given)
    return pattern


def _offload(zero: Section) -> Any:
    """Return an `Offload`, or None."""
    optimizer, params = zero("offload_optimizer"), zero("offload_param")
    tiers = {"none": None, "cpu": "cpu", "nvme": "nvme"}
    where: Any = optimizer.word("device", tiers) or ("cpu" if zero.flag("cpu_offload") else None)
    other: Any = params.word("device", tiers) or ("cpu" if zero.flag("cpu_offload_param") else None)
    ratio = optimizer.number("ratio", 1.0, 0.0)
    paths = [
        path
        for block, tier in ((optimizer, where), (params, other))
        if tier == "nvme" and (path := block.text("nvme_path")) is not None
    ]
    if len(set(paths)) > 1:
        raise ValueError(
            f"from_deepspeed: offload_optimizer.nvme_path and offload_param.nvme_path differ, {paths[0]!r} and "
            f"{paths[1]!r}. ZeroFn stripes all state over its folders: write Offload(path=[...]) with both."
        )
    if ratio != 1.0 and where is None:
        raise ValueError("from_deepspeed: offload_optimizer.ratio has no effect without offload_optimizer.device.")
    if where is None and other is None:
        return None
    return zerofn.Offload(where, other, path=paths[0] if paths else None, fraction=ratio)


def _remat(block: Section) -> dict[str, Any]:
    asked = block.flag("partition_activations") or block.flag("cpu_checkpointing")
    asked = asked or block.values.get("number_checkpoints") is not None
    return {"remat": "full"} if asked else {}
