"""Adapters of PEFT's, saved as `PeftModel.from_pretrained` opens them, and what is saved beside any weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is PEFT's, or one of transformers' with adapters."""
    return hasattr(model, "peft_config") and (
        getattr(model, "_hf_peft_config_loaded", False) or not isinstance(model, transformers.PreTrainedModel)
    )


def check_adapters(model: Any) -> None:
    """Raise `ValueError` for adapters that the captured step cannot have."""
    for name, config in model.peft_config.items():
        if getattr(config, "target_parameters", None):
            raise ValueError(
                f"Trainer: the adapter {name!r} has target_parameters={config.target_parameters!r}, which replaces "
                "parameters while the model runs, but a captured step receives its parameters before. Write the names "
                "of layers into target_modules instead."
            )


def save_adapters(model: Any, out: Path, writes: bool) -> None:
    """Write a model's adapters, as its `save_pretrained` does; only they are gathered. `writes`: whether this rank
    writes. All ranks must call it.
    """
    from peft import get_peft_model_state_dict

    given: dict[str, Tensor] = model.state_dict(keep_vars=True)  # reads no value
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    for adapter in model.peft_config:
        found = {id(x) for x in get_peft_model_state_dict(model, state_dict=given, adapter_name=adapter).values()}
        names |= {name for name, x in given.items() if id(x) in found}
    values = {name: x.detach() for name, x in given.items() if name in names}
    if writes:
        model.save_pretrained(out, state_dict=values)


def load_adapters(model: Any, folder: Path) -> None:
    """Give a model the adapters that were saved in a folder. All ranks must call it."""
    from peft import load_peft_weights, set_peft_model_state_dict

    active = model.active_adapters() if callable(model.active_adapters) else model.active_adapters
    for adapter in model.peft_config:
        beside = folder / adapter
        if beside.is_dir() or adapter in active:
            weights = load_peft_weights(str(beside if beside.is_dir() else folder), device="cpu")
            set_peft_model_state_dict(model, weights, adapter_name=adapter)


def as_saved(model: nn.Module) -> None:
    """Let the config say what `save_pretrained` writes into it. One rank alone saves, and what the config says decides
    about a capture.
    """
    if isinstance(model, transformers.PreTrainedModel):
        model.config.architectures = [type(model).__name__]
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        return
    for part in model.children():
        as_saved(part)


def save_beside(model: nn.Module, processor: Any, args: Any, out: Path) -> None:
    """Write what `from_pretrained` and transformers' trainers open beside weights."""
    if isinstance(model, transformers.PreTrainedModel):
        model.config.save_pretrained(out)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(out)
    if processor is not None:
        processor.save_pretrained(out)
    torch.save(args, out / "training_args.bin")
