"""Changes of a model that may be made once."""

from __future__ import annotations

from torch import nn


def once(change: str, model: nn.Module) -> None:
    """Note a change of a model by the name of the function that makes it. Raises `ValueError` for a second one."""
    made: set[str] = model.__dict__.setdefault("_zerofn_changes", set())
    if change in made:
        raise ValueError(
            f"{change}: it has changed this {type(model).__name__} before; make a new skeleton, and call it once."
        )
    made.add(change)
