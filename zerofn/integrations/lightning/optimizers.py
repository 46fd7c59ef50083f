"""What Lightning's `Trainer` says of gradients, as a transformation."""

from __future__ import annotations

from typing import Any

from zerofn import optim


def clipping(value: float | None, algorithm: Any) -> Any:
    """Return the transformation of `Trainer(gradient_clip_val=, gradient_clip_algorithm=)`."""
    if not value:
        return None
    by_value = str(getattr(algorithm, "value", algorithm) or "norm") == "value"
    return optim.clip(float(value)) if by_value else optim.clip_by_global_norm(float(value))
