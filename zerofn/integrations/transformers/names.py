"""The names that weights have in files: transformers gives those of some models others as it loads and saves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def of_files(model: Any) -> dict[str, str]:
    """Return name in the model -> name in the files that its `save_pretrained` writes, where these differ.

    Weights that transformers also cuts or joins, such as a layer's experts, keep the model's names, under which
    `from_pretrained` opens them, too.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    given = model.state_dict(keep_vars=True)  # reads no value
    empty = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in given.items()}
    names = {id(x): name for name, x in empty.items()}
    written = {names.get(id(x)): name for name, x in revert_weight_conversion(model, empty).items()}
    return {name: new for name, new in written.items() if name is not None and name != new}


def exported(model: Any) -> Callable[[str], str | None]:
    """Return what names a state's leaf in a file, None for one that is not written."""
    names = of_files(model)

    def name_of(path: str) -> str | None:
        part, _, name = path.partition(".")
        return names.get(name, name) if part in ("params", "extra") else None

    return name_of


def loaded(model: Any) -> Callable[[str], str]:
    """Return what names a tensor of a file in the model."""
    names = {new: name for name, new in of_files(model).items()}
    return lambda name: names.get(name, name)
