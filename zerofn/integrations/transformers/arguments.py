"""transformers' `TrainingArguments`, with ZeroFn's beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers

import zerofn

from .meshes import axes_of
from .padding import MULTIPLE

if TYPE_CHECKING:
    _Arguments = Any
else:
    _Arguments = object  # one of transformers' two classes comes behind it

_MULTIPLE = "lengths of batches are rounded up to a multiple of it; 1 leaves batches unchanged"
_OF_FSDP = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0}


@dataclass
class OurArguments(_Arguments):
    """What ZeroFn adds."""

    stage: int = field(default=3, metadata={"help": "ZeRO's stage, 0 to 3"})
    memory: str | None = field(
        default=None, metadata={"help": "device memory that a step may use on a rank, such as 24GiB"}
    )
    offload: str | None = field(
        default=None, metadata={"help": "cpu or nvme: where optimizer state and parameters are stored"}
    )
    remat: str | None = field(default=None, metadata={"help": "full or auto: recompute activations"})
    mesh: str | None = field(default=None, metadata={"help": "sizes of axes, such as data=2,tensor=2"})
    wire: str | None = field(
        default=None,
        metadata={"help": "wire codec of parameters and gradients: int8, or for example gather=int8,reduce=fp8"},
    )

    def __post_init__(self) -> None:
        self.axes, self._form = axes_of(self.mesh), zerofn.Precision(wire=cast(Any, self.wire or None)).wire
        self._of_deepspeed: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._scheduler: dict[str, Any] = {}  # DeepSpeed's
        given, self.deepspeed = getattr(self, "deepspeed", None), None
        fsdp, self.fsdp = getattr(self, "fsdp", None), None
        if given and fsdp:
            raise ValueError("TrainingArguments: deepspeed= and fsdp= both choose how to shard. Leave one of them out.")
        if getattr(self, "gradient_checkpointing", False) or getattr(self, "activation_checkpointing", False):
            self.gradient_checkpointing = self.activation_checkpointing = False
            self.remat = self.remat or "full"
        super().__post_init__()
        multiple = getattr(self, "pad_to_multiple_of", None)
        if multiple is not None and (type(multiple) is not int or multiple < 1):
            raise ValueError(
                f"TrainingArguments: pad_to_multiple_of must be a positive integer, got {multiple!r}. Lengths of "
                "batches are rounded up to a multiple of it; with 1, batches stay as the collator makes them."
            )
        if fsdp:
            self._take_fsdp(fsdp)
        if given:
            self._take_deepspeed(given)

        if getattr(self._form, "feedback", False) and self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"TrainingArguments: wire={self.wire!r} has feedback, which needs one gradient for each step, but each "
                f"of the gradient_accumulation_steps={self.gradient_accumulation_steps} microbatches may have its own "
                "shape and its own gradient. Write wire='reduce=int8,rounding=stochastic', which stores no errors, or "
                "gradient_accumulation_steps=1."
            )

    def _take_deepspeed(self, given: str | Mapping[str, Any]) -> None:
        """Read a DeepSpeed configuration, with `"auto"` from these arguments, as transformers fills it."""
        content = json.loads(Path(given).read_text()) if isinstance(given, str | Path) else dict(given)
        auto = {
            "train_micro_batch_size_per_gpu": self.per_device_train_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_clipping": self.max_grad_norm,
            "bf16.enabled": self.bf16,
            "fp16.enabled": self.fp16,
        }
        scheduler, optimizer = content.pop("scheduler", None), content.pop("optimizer", None)
        named = {path.rpartition(".")[2] for path in _autos(content)} | set(_autos(content))
        setup = zerofn.from_deepspeed(
            content,
            auto={k: v for k, v in auto.items() if k in named},
            tx=zerofn.optim.identity(),
            world=self.world_size,
        )
        self._check(content)
        self._scheduler = scheduler or {}
        self.schedule_of_deepspeed(10**6)  # raises for what it cannot be
        self._take_optimizer(optimizer or {})
        if self.stage not in (self.__dataclass_fields__["stage"].default, setup.shard["stage"]):
            raise ValueError(
                f"TrainingArguments: the DeepSpeed file has stage {setup.shard['stage']}, but the arguments have "
                f"stage={self.stage}. Leave stage= out."
            )
        self.stage = setup.shard["stage"]
        self._of_deepspeed = (setup.shard, setup.compile)

    def _check(self, content: Mapping[str, Any]) -> None:
        """Raise `ValueError` where the file and the arguments say two things: neither would be silently right."""
        said = {
            "train_micro_batch_size_per_gpu": self.per_device_train_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "gradient_clipping": self.max_grad_norm,
        }
        for key, mine in said.items():
            theirs = content.get(key, "auto")
            if theirs != "auto" and float(theirs) != float(mine):
                raise ValueError(
                    f"TrainingArguments: the DeepSpeed file has {key}={theirs}, but the arguments have {mine}. Write "
                    '"auto" in the file, or the same in both.'
                )

    def schedule_of_deepspeed(self, max_steps: int) -> Callable[[int], float] | None:
        """Return the learning rate of every update as the DeepSpeed file's scheduler has it; None without one."""
        if not self._scheduler:
            return None
        auto = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": self.learning_rate,
            "warmup_num_steps": max(1, self.get_warmup_steps(max_steps)),
            "total_num_steps": max_steps,
        }
        params = {k: auto.get(k, v) if v == "auto" else v for k, v in self._scheduler.get("params", {}).items()}
        config = {
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": self.learning_rate}},
            "scheduler": {**self._scheduler, "params": params},
        }
        rate = zerofn.from_deepspeed(config, world=1).schedule
        return lambda update: float(rate(update)) if callable(rate) else float(rate)

    def _take_optimizer(self, optimizer: Mapping[str, Any]) -> None:
        """Take the file's optimizer as arguments."""
        kind, params = optimizer.get("type"), dict(optimizer.get("params", {}))
        if kind is None:
            return
        if kind.lower() not in ("adam", "adamw"):
            raise ValueError(
                f"TrainingArguments: the DeepSpeed file's optimizer {kind} is not supported here. Leave it out of the "
                "file, and write optim=."
            )
        # What the file does not say is DeepSpeed's default, and not the arguments'.
        decay = 0.01 if params.get("torch_adam") and kind.lower() == "adamw" else 0.0
        params = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay, **params}
        names = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
        for key, value in params.items():
            if value == "auto" or key in ("torch_adam", "adam_w_mode"):
                continue
            if key == "betas":
                self.adam_beta1, self.adam_beta2 = value
            elif key in names:
                setattr(self, names[key], value)
            else:
                raise ValueError(
                    f"TrainingArguments: optimizer.params.{key} of the DeepSpeed file is not supported "
                    "here. Leave it out."
                )

    def _take_fsdp(self, given: Any) -> None:
        """Read what FSDP's options say of stages and offload."""
        config = self.fsdp_config or {}
        if isinstance(config, str):
            config = json.loads(Path(config).read_text())
        config = {k.removeprefix("fsdp_"): v for k, v in config.items()}
        words = given.split() if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else []
        words = [getattr(x, "value", str(x)) for x in words if x not in ("True", "true")]
        self.stage = 3 if config.get("reshard_after_forward", True) else 2
        for word in words:
            if word == "offload":
                self.offload = "cpu"
            elif word in _OF_FSDP:
                self.stage = _OF_FSDP[word]
            elif word != "auto_wrap":
                raise ValueError(f"TrainingArguments: fsdp={word!r} has no counterpart here.")
        if config.get("cpu_offload"):
            self.offload = "cpu"
        if config.get("activation_checkpointing"):
            self.remat = self.remat or "full"

    def take(self) -> None:
        """Note that ZeroFn's `Trainer` has them, which knows what they say."""
        self._taken = True

    @property
    def place_model_on_device(self) -> bool | None:
        """Transformers' own. Every `Trainer` asks for it first, so that one that would not take notice is told."""
        if not getattr(self, "_taken", False):
            raise ValueError(
                "Trainer: this is the Trainer of transformers, which ignores ZeroFn's TrainingArguments. Import "
                "Trainer from zerofn.integrations.transformers, too."
            )
        return super().place_model_on_device

    @property
    def shard_options(self) -> dict[str, Any]:
        """Arguments of `zerofn.shard`."""
        precision = "bf16" if self.bf16 else "fp16" if self.fp16 else None
        if self._of_deepspeed is not None:
            theirs = self._of_deepspeed[0]
            return {**theirs, "precision": theirs.get("precision") or precision, **self._wire}
        offload = {"offload": self.offload} if self.offload else {}
        return {"stage": self.stage, "precision": precision, **offload, **self._wire}

    @property
    def _wire(self) -> dict[str, Any]:
        return {} if self._form is None else {"wire": self._form}

    @property
    def computes_in(self) -> torch.dtype | None:
        """The dtype in which a model computes, None for its own."""
        precision = self.shard_options["precision"]
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, getattr(precision, "compute", None))

    @property
    def evaluates_in(self) -> torch.dtype | None:
        """The dtype that a model is cast to where it is evaluated without being trained, None for its own."""
        return torch.bfloat16 if self.bf16_full_eval else torch.float16 if self.fp16_full_eval else None

    @property
    def compile_options(self) -> dict[str, Any]:
        """Arguments of `zerofn.compile`."""
        own = {"memory": self.memory, "remat": self.remat}
        theirs = self._of_deepspeed[1] if self._of_deepspeed is not None else {}
        return {**theirs, **{k: v for k, v in own.items() if v is not None}}


def _autos(content: Mapping[str, Any], above: str = "") -> list[str]:
    """Return the keys whose value is "auto"."""
    found = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            found += _autos(value, f"{above}{key}.")
        elif value == "auto":
            found.append(f"{above}{key}")
    return found


@dataclass
class TrainingArguments(OurArguments, transformers.TrainingArguments):
    """transformers' arguments, and `stage`, `memory`, `offload`, `remat`, `mesh` and `wire`.

    `deepspeed=` takes a DeepSpeed configuration, and `fsdp=` with `fsdp_config=` FSDP's words, as arguments of ZeroFn;
    neither package is needed. `gradient_checkpointing` becomes `remat="full"`. `mesh="data=-1,tensor=2"` names axes of
    `zerofn.Mesh.make`: pipe, data, replicate, expert and tensor. `wire="int8"`, or
    `wire="gather=int8,reduce=int4,feedback=true"`, is `shard(wire=)`. Rows are padded to a length that is a multiple of
    `pad_to_multiple_of`; 1 leaves batches as the collator makes them, on every rank.
    """

    pad_to_multiple_of: int = field(default=MULTIPLE, metadata={"help": _MULTIPLE})


@dataclass
class Seq2SeqTrainingArguments(OurArguments, transformers.Seq2SeqTrainingArguments):
    """The same for `Seq2SeqTrainer`."""

    pad_to_multiple_of: int = field(default=MULTIPLE, metadata={"help": _MULTIPLE})
