"""Cross-entropy of logits that are sliced by vocabulary: no rank ever has all logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..collectives.maps import Linear, Psum
from ..collectives.over_ranks import rows_over
from ..comm.axes import TENSOR
from ..comm.current_mesh import axis_of
from ..comm.mesh import Axis
from ..geometry.cuts import equal
from ..util.arguments import checked
from .sequence import shifted

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)


@checked()
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    axis: str | Axis = TENSOR,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy where each rank has the logits of its slice of the vocabulary.

    `logits` [..., v]: floating; the output of a head that is sliced by columns and not gathered. Of `vocab_size`
    entries each of n ranks has ceil(vocab_size / n), the last ones fewer. `labels` [...]: integers, the same on all
    ranks. A label equal to `ignore_index` does not count; a label outside the vocabulary has the loss nan. `axis`: the
    ranks that share the vocabulary. `reduction`: "mean" over labels that count, "sum", or "none".

    -> a scalar, or [...] with "none": the same on all ranks, in float32 for logits of fewer bits, else in their dtype.
    For each token, ranks send the maximum of their logits and two sums. All ranks must call it. Raises `ValueError` for
    logits of the wrong size, for labels of the wrong shape and for an unknown reduction.

    >>> logits, labels = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([0])
    >>> cross_entropy(logits, labels, 3, axis="data")
    tensor(0.4076)
    """
    where = axis_of(axis)
    cut = equal(where.name, 0, vocab_size, where.size)
    _check(logits, labels, cut.length(where.rank), vocab_size, where, reduction)
    ((start, stop),) = cut.slices[where.rank]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Any number would do, so its derivative is none: log(sum(exp(x - greatest))) + greatest is the same for each.
    greatest = rows_over(wide.detach().amax(-1), where).amax(0)
    here = (labels >= start) & (labels < stop)
    of_label = wide.gather(-1, torch.where(here, labels - start, 0).unsqueeze(-1)).squeeze(-1)
    terms = torch.stack([(wide - greatest.unsqueeze(-1)).exp().sum(-1), (of_label - greatest) * here])
    weights, scores = Linear.apply(Psum(where), terms)[0].unbind(0)
    counts = labels != ignore_index
    losses = torch.where((labels >= 0) & (labels < vocab_size), weights.log() - scores, float("nan"))
    losses = torch.where(counts, losses, 0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def _check(logits: Tensor, labels: Tensor, size: int, vocab_size: int, axis: Axis, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: expected reduction to be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    if logits.shape[-1] != size:
        raise ValueError(
            f"cross_entropy: rank {axis.rank} of {axis.size} along {axis.name!r} has {size} of {vocab_size} entries of "
            f"the vocabulary, but got logits {list(logits.shape)}; pass the output of a head that is 'colwise', which "
            "does not gather logits."
        )
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: expected labels {list(logits.shape[:-1])} for logits {list(logits.shape)}, got "
            f"{list(labels.shape)}."
        )


def has_causal_loss(model: Any) -> bool:
    """Return whether a transformers model uses the loss of causal models: it does if its config names no other loss."""
    return hasattr(model, "loss_function") and getattr(model, "loss_type", None) in ("ForCausalLM", None)


def give_loss_of_slices(model: Any, axis: Axis, vocab_size: int) -> None:
    """Let a model of transformers, whose head returns a rank's logits, compute its loss from them."""
    asked: list[bool] = []
    knows = has_causal_loss(model)
    if knows:
        model.loss_function = _causal_loss(axis, vocab_size, asked)
    model.forward = _with_loss_of_slices(model, model.forward, asked, knows)


def _causal_loss(axis: Axis, size: int, asked: list[bool]) -> Callable[..., Tensor]:
    """Return the loss that transformers uses for whole logits, with its arguments. `asked`: notes the call."""

    def loss(
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Any = None,
        **_: Any,
    ) -> Tensor:
        asked.append(True)
        if labels is not None and shift_labels is None:
            shift_labels = shifted(labels, ignore_index)
        reduction: Reduction = "mean" if num_items_in_batch is None else "sum"
        found = cross_entropy(logits, shift_labels, size, axis=axis, ignore_index=ignore_index, reduction=reduction)
        return found if num_items_in_batch is None else found / num_items_in_batch

    return loss


def _with_loss_of_slices(model: Any, forward: Callable[..., Any], asked: list[bool], knows: bool) -> Callable[..., Any]:
    """Return a forward that raises if labels would meet sliced logits in a loss that needs whole ones."""

    def refuse() -> None:
        raise ValueError(
            f"{type(model).__name__} has its own loss, which needs whole logits, but with this plan each rank has a "
            "slice of them: call the model without labels, and pass its logits to zerofn.parallel.cross_entropy."
        )

    @functools.wraps(forward)
    def run(*args: Any, **inputs: Any) -> Any:
        labelled = inputs.get("labels") is not None
        if labelled and not knows:
            refuse()
        asked.clear()
        out = forward(*args, **inputs)
        if labelled and not asked:
            refuse()
        return out

    return run
