"""Marks of changes that may be made to a model only once."""

from __future__ import annotations

from torch import nn


def once(change: str, model: nn.Module) -> None:
    """Mark a model as changed by the function `change`. Raises `ValueError` if the model has that mark already."""
    made: set[str] = model.__dict__.setdefault("_zerofn_changes", set())
    if change in made:
        raise ValueError(
            f"{change}: was already called on this {type(model).__name__}; make a new skeleton, and call it once."
        )
    made.add(change)
