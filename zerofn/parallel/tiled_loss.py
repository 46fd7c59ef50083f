"""A loss that computes logits for some tokens at a time (a tile), and again in the backward pass."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..training.remat import remat
from ..util.arguments import checked
from .cross_entropy import has_causal_loss
from .sequence import IGNORED, shifted


@checked()
def tiled_loss(model: nn.Module, tiles: int = 8) -> None:
    """Let a transformers decoder compute its loss without ever having all logits at once.

        zerofn.parallel.tiled_loss(model)
        loss = functional_call(model, params, (), batch).loss

    `tiles`: the number of parts into which sequences are split. If the model is called with labels, its head and its
    loss run on one part after the other, and again in the backward pass; its output then has no logits. Call `tensor`
    before `tiled_loss`.

    Raises `TypeError` for anything but a transformers decoder with a head. Raises `ValueError` for fewer tiles than
    one, and, when the model is called with labels, for a model that uses logits for more than its loss.
    """
    name = type(model).__name__
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not has_causal_loss(model):
        raise TypeError(f"tiled_loss: expected a transformers decoder with a head and a loss, got {name}.")
    if tiles < 1:
        raise ValueError(f"tiled_loss: expected tiles to be 1 or more, got {tiles}.")
    _give(model, head, tiles)


def _give(model: Any, head: nn.Module, tiles: int) -> None:
    run, of_whole = model.forward, model.loss_function
    of_head, hidden = head.forward, _Hidden()

    def later(x: Tensor) -> Tensor:
        return of_head(x) if hidden.seen is None else hidden.take(x)

    def of_tiles(logits: Tensor, labels: Any = None, *args: Any, shift_labels: Any = None, **kwargs: Any) -> Tensor:
        x = hidden.give(logits, type(model).__name__)
        ignored = kwargs.get("ignore_index", IGNORED)
        if shift_labels is None:
            shift_labels = shifted(labels, ignored)
        if kwargs.get("num_items_in_batch") is None:
            kwargs["num_items_in_batch"] = (shift_labels != ignored).sum()
        params = {k: v for k, v in head._parameters.items() if v is not None}

        def of_tile(params: Any, x: Tensor, labels: Tensor) -> Tensor:
            logits = functional_call(head, params, (x,))
            return of_whole(logits, labels, *args, shift_labels=labels.contiguous(), **kwargs)

        parts = zip(x.chunk(tiles, -2), shift_labels.chunk(tiles, -1), strict=True)
        return torch.stack([remat(of_tile)(params, *part) for part in parts]).sum()

    @functools.wraps(run)
    def forward(*args: Any, **inputs: Any) -> Any:
        if inputs.get("labels") is None:
            return run(*args, **inputs)
        with hidden:
            out = run(*args, **inputs)
        if not hasattr(out, "logits"):
            raise ValueError("tiled_loss: call the model with return_dict=True, and read its loss by name.")
        out.logits = None
        return out

    head.forward, model.loss_function, model.forward = later, of_tiles, forward


class _Hidden:
    """The input of the head, stored until the loss asks for it."""

    def __init__(self) -> None:
        self.seen: list[Tensor] | None = None

    def __enter__(self) -> None:
        self.seen = []

    def __exit__(self, *_: object) -> None:
        self.seen = None

    def take(self, x: Tensor) -> Tensor:
        """Store the input of the head."""
        assert self.seen is not None
        self.seen.append(x)
        return x

    def give(self, logits: Tensor, name: str) -> Tensor:
        """Return the stored input, and let the head work again."""
        seen, self.seen = self.seen or [], None
        if len(seen) != 1 or seen[0] is not logits:
            raise ValueError(
                f"tiled_loss: {name} does more with its logits than compute the loss (it scales or caps them, for "
                "example). Write the loss function yourself, with zerofn.remat around the loss of each tile."
            )
        return logits
