"""Unmodified transformers models on parts of sequences, whose attention sees the whole sequences."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..collectives.maps import AllGather, CheckedSame, Linear
from ..comm.axes import CONTEXT
from ..comm.mesh import Axis, Mesh
from ..ops.block_attention import NUMBERS
from ..sparse.attention import What, pattern_of
from ..sparse.blocks import Blocks
from ..sparse.layout import Layout
from ..sparse.part import places as places_of
from ..sparse.patterns import Pattern
from ..sparse.rows import Spans
from ..sparse.use import layout_in_use
from ..util.arguments import checked
from ..util.context import inside
from ..util.patches import Patches, Replacement
from .applied_once import once
from .attention import METHODS, Method, attention, check_method
from .check_context import ForeignMask, Ways, check_context, note_attention
from .chunks import Chunks, chunks_for
from .windows import window_of

_FOREIGN = ("position_bias", "s_aux", "softcap")  # what other attention has, and this one has not
_MASKED = {"full_attention", "sliding_attention", "chunked_attention"}  # layers that differ in their mask alone
_masks: ContextVar[_Masks | None] = ContextVar("masks", default=None)  # of a model's call
_LABELS_AS_THEY_ARE = ("ForMaskedLM", "ForTokenClassification")  # losses that do not shift labels


class _Made(NamedTuple):
    """A mask of whole sequences that the model got. `window`: the pattern for which it stands, if it is only a
    placeholder.
    """

    mask: Tensor
    window: Pattern | None


class _Masks(NamedTuple):
    """The masks that one call of a model asks for and gets. `documents`: those of its rows, if they have several."""

    axis: Axis
    made: list[_Made]
    documents: Spans | None


@checked()
def context(model: nn.Module, mesh: Mesh, *, method: Method | None = None, chunks: Chunks | None = None) -> None:
    """Let a transformers model compute with parts of sequences, over the mesh's axis "context".

        mesh = zerofn.Mesh.make(data=-1, context=2)
        model = zerofn.skeleton(build)
        zerofn.parallel.context(model, mesh)
        batch = zerofn.parallel.split_sequence(batch, mesh)
        loss = functional_call(model, params, (), batch).loss

    `method`: see `attention`; by default "ulysses" if the ranks can share the heads, else "ring". `context` registers
    its attention functions with transformers, as "zerofn_ulysses" and "zerofn_ring", and switches the model to one of
    them. The model's forward then accepts the result of `split_sequence`, and the mean of its loss over ranks is the
    loss of whole sequences. Ranks compare their rows in every step. Positions are counted as the model counts them:
    RoBERTa, for example, starts at padding_idx + 1 and skips padding tokens. Layers may use sliding-window attention
    and, with "ulysses", chunked attention (as Llama 4 does). `chunks`: those that `split_sequence` was called with; see
    `balanced_chunks`.

    First, a small model of the same class computes a row in parts and as a whole, in float64 and without a transfer:
    outputs and gradients must be equal to 1e-6. If no small model can be made, the log says so.

    Raises `TypeError` for anything but a decoder or encoder of transformers. Raises `ValueError` for a mesh without the
    axis, for a second call, for a model that computes different values on parts, for heads that ranks cannot divide,
    and, when the model is called, for a batch that was not split by `split_sequence`.
    """
    axis = mesh.axis(CONTEXT)
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if not hasattr(model, "set_attn_implementation") or config is None:
        raise TypeError(f"context: {name} is not a transformers model. In it, call zerofn.parallel.attention yourself.")
    config = config.get_text_config()
    if method is None:
        heads = getattr(config, "num_attention_heads", None)
        unshared = isinstance(heads, int) and heads % (axis.size * _shares_of_heads(mesh))
        method = "ring" if unshared else "ulysses"
    check_method("context", method)
    dealt = chunks_for(axis.size, chunks, "context")
    once("context", model)
    ways = Ways()
    if axis.size > 1:
        _check(model, name, config, axis, _shares_of_heads(mesh), method)
        _register()
        ways = check_context(model, axis, method, functools.partial(_cut, method))
    _cut(method, model, axis, ways, dealt)


def _shares_of_heads(mesh: Mesh) -> int:
    """Return the number of ranks that have slices of the same layers."""
    return math.prod(axis.size for axis in mesh.partial)


class _Cut(NamedTuple):
    """How a model's sequences are cut."""

    axis: Axis
    ways: Ways
    chunks: Chunks


def _cut(method: str, model: Any, axis: Axis, ways: Ways, chunks: Chunks | None = None) -> None:
    """Let the model compute with parts of sequences."""
    cut = _Cut(axis, ways, Chunks.early_and_late(axis.size) if chunks is None else chunks)
    _copy_configs(model)
    config = model.config.get_text_config()
    if axis.size > 1 or ways.rehearsed:
        _switch(model, config, method, cut)
    model.forward = _of_parts(model, model.forward, config, f"zerofn_{method}", cut)


def _copy_configs(model: nn.Module) -> None:
    """Give the model its own configs: the choice of attention is stored in them, and other models may share them."""
    memo: dict[int, Any] = {}
    for part in model.modules():
        if hasattr(part, "config"):
            part.config = copy.deepcopy(part.config, memo)


def _switch(model: Any, config: Any, method: str, cut: _Cut) -> None:
    """Replace the model's attention by ours."""
    model.set_attn_implementation(f"zerofn_{method}")
    if config._attn_implementation != f"zerofn_{method}":
        raise TypeError(f"context: {type(model).__name__} computes attention in its own code. Use other axes.")
    for part in model.modules():
        part.zerofn_cut = cut  # attention is handed its module


def _check(model: nn.Module, name: str, config: Any, axis: Axis, slices: int, method: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"context: {name} has an encoder and a decoder, whose sequences differ. Use other axes.")
    odd = set(getattr(config, "layer_types", None) or ()) - _MASKED
    odd |= {type(x).__name__ for x in model.modules() if isinstance(x, nn.Conv1d | nn.RNNBase)}
    if odd:
        found = ", ".join(sorted(odd))
        raise ValueError(f"context: {name} mixes tokens by {found}, but only attention can be split. Use other axes.")
    heads = getattr(config, "num_attention_heads", None)
    if method == "ulysses" and isinstance(heads, int) and heads % (axis.size * slices):
        each = f"{heads // slices} of the {heads}" if slices > 1 else f"the {heads}"
        raise ValueError(
            f"context: {axis.size} ranks along {axis.name!r} cannot divide {each} heads of {name} equally. Write "
            "method='ring', which works for any number of heads."
        )


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for method in METHODS:
        AttentionInterface.register(f"zerofn_{method}", functools.partial(_attend, method))
        AttentionMaskInterface.register(f"zerofn_{method}", functools.partial(_mask, method))


def _mask(
    method: str,
    *,
    q_length: int,
    mask_function: Callable[..., Tensor],
    device: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> Tensor | None:
    """What transformers asks for a mask: attention knows by itself what is before a token. Of layers that look at a
    window, it is something that stands for that; of layers that look at a chunk, and where attention by layouts is not
    computed, the mask of whole sequences. A mask that the model makes goes to attention, which refuses it unless it
    hides nothing.
    """
    call = _masks.get()
    if local_size is None or call is None:
        return attention_mask
    window, length = window_of(mask_function), q_length * call.axis.size
    if window is not None and dtype in NUMBERS and torch.device(device or "cpu").type == "cpu":
        call.made.append(_Made(torch.ones((), dtype=torch.bool, device=device).expand(1, 1, q_length, length), window))
        return call.made[-1].mask
    if method == "ring" and call.axis.size > 1:
        where = f"a window in {dtype} on {device}, only in float32, float64 and bfloat16 on the CPU"
        raise ValueError(
            "attention over a split sequence: with method='ring' layers may attend causally or within a window, but "
            f"not within {f'chunks of {local_size} tokens' if window is None else where}. Write method='ulysses'."
        )
    place = torch.arange(length, device=device)
    first = place.new_zeros(1, 1, 1, 1)  # of all rows and heads
    call.made.append(_Made(mask_function(first, first, place[:, None][None, None], place[None, None, None]), None))
    return call.made[-1].mask


def _attend(
    method: Method,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """q [B, H, s, D], k and v [B, G, s, D] -> [B, s, H, D], as transformers calls it."""
    name = type(module).__name__
    found = [what for what in _FOREIGN if more.get(what) is not None]
    if found or dropout:
        what = ", ".join(found) or f"dropout={dropout}"
        raise ValueError(
            f"attention over a split sequence does not support {what}, which {name} uses. Turn it off in the model's "
            "config."
        )
    call, cut = _masks.get(), module.zerofn_cut
    made = next((x for x in (call.made if call is not None else ()) if x.mask is attention_mask), None)
    if made is None and more.get("sliding_window") is not None:
        raise ValueError(f"attention over a split sequence: {name} asked for a window, but passed no mask for it.")
    if attention_mask is not None and made is None and not cut.ways.makes_masks:
        raise ForeignMask(
            f"attention over a split sequence does not support a mask, but {name} got one from its model. Turn it off "
            "in the model's config, or give the axis 'context' size 1."
        )
    note_attention()
    if is_causal is None:  # a mask that hides nothing is that of an encoder
        is_causal = getattr(module, "is_causal", attention_mask is None)
    given = _what(name, made, layout_in_use(), None if call is None else call.documents)
    given = {"causal": is_causal, "scale": scaling, "chunks": cut.chunks, **given}
    out = attention(query, key, value, axis=cut.axis, method=method, **given)
    return out.transpose(1, 2).contiguous(), None


def _what(name: str, made: _Made | None, layout: What | None, documents: Spans | None) -> dict[str, Any]:
    """Return the layout of a layer's attention, as arguments of `attention`. `layout`: the one from `sparse.use`."""
    if layout is not None and made is not None:
        raise ValueError(
            f"attention over a split sequence has a layout from zerofn.sparse.use, but {name} also asks for a window. "
            "Build the model without a window, and add the window to the layout."
        )
    if documents is not None and isinstance(layout, Layout | Blocks):
        raise ValueError(
            f"attention over a split sequence: rows contain several documents, but the {type(layout).__name__} that "
            f"{name} has from zerofn.sparse.use cannot be combined with documents. Pass a pattern to zerofn.sparse.use."
        )
    if made is None:
        both = None if layout is None or documents is None else pattern_of(layout) & documents
        return {"layout": both or layout or documents}
    if made.window is not None:
        return {"causal": False, "layout": made.window if documents is None else made.window & documents}
    if documents is not None:
        raise ValueError(
            f"attention over a split sequence: {name} attends within chunks of each document, which is not supported "
            "for rows with several documents. Put one document into each row, or give the axis 'context' size 1."
        )
    return {"mask": made.mask}


def _unpacked(find: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return what says which tokens are of one row: all that a rank has, though their positions are of two chunks."""

    @functools.wraps(find)
    def found(position_ids: Tensor) -> Tensor | None:
        return find(position_ids) if _masks.get() is None else None

    return found


def _replacements() -> Iterator[Replacement]:
    from transformers import masking_utils

    yield masking_utils, "find_packed_sequence_indices", _unpacked


_one_row = Patches(_replacements)


def _of_parts(
    model: Any, forward: Callable[..., Any], config: Any, implementation: str, cut: _Cut
) -> Callable[..., Any]:
    """Return the model's forward for what `split_sequence` returns."""
    axis, name = cut.axis, type(model).__name__

    @functools.wraps(forward)
    def run(
        *args: Any,
        row_digest: Tensor | None = None,
        items_per_row: Tensor | None = None,
        document_spans: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        _check_inputs(name, inputs, row_digest)
        assert row_digest is not None
        if axis.size > 1 and config._attn_implementation != implementation:
            raise ValueError(
                f"{name}: the model's attention was changed to {config._attn_implementation!r}, which sees only a "
                f"rank's part of the sequences. Leave it {implementation!r}, as zerofn.parallel.context has set it."
            )
        positions = inputs.pop("position_ids")
        if axis.size > 1:
            inputs["position_ids"] = _positions(
                name, inputs.get("input_ids"), positions, document_spans, row_digest, cut
            )
        elif document_spans is not None:
            inputs["position_ids"] = positions  # by which the model tells documents apart, where it has no cache
            inputs |= {"use_cache": False} if getattr(config, "use_cache", False) else {}
        if inputs.get("labels") is None:
            return _run(forward, axis, document_spans, *args, **inputs)
        inputs |= _counted(model, inputs, items_per_row, axis)
        asked: list[bool] = []
        loss_function = model.loss_function

        def noted(*args: Any, **kwargs: Any) -> Any:
            asked.append("num_items_in_batch" in kwargs)
            return loss_function(*args, **kwargs)

        model.loss_function = noted
        try:
            out = _run(forward, axis, document_spans, *args, **inputs)
        finally:
            model.loss_function = loss_function
        if asked != [True]:
            raise ValueError(
                f"{name} has its own loss, which would treat a rank's part of a sequence as a whole sequence. "
                "Call the model without labels, and compute the loss from its logits: "
                "size * (sum over the rank's labels) / items_per_row.sum(), with the size of the axis 'context'."
            )
        return out

    return run


def _check_inputs(name: str, inputs: Mapping[str, Any], row_digest: Tensor | None) -> None:
    if row_digest is None or "position_ids" not in inputs:
        raise ValueError(
            f"{name} expects parts of sequences: write `batch = zerofn.parallel.split_sequence(batch, mesh)`, and pass "
            "every entry of the result to the model."
        )
    if inputs.get("attention_mask") is not None:
        raise ValueError(f"{name}: attention over a split sequence does not support attention_mask. Leave it out.")


def _run(forward: Callable[..., Any], axis: Axis, spans: Tensor | None, /, *args: Any, **inputs: Any) -> Any:
    if axis.size == 1 and spans is not None:
        return forward(*args, **inputs)
    with inside(_masks, _Masks(axis, [], None if spans is None else Spans(spans))), _one_row:
        return forward(*args, **inputs)


def _positions(name: str, ids: Any, positions: Tensor, spans: Tensor | None, digest: Tensor, cut: _Cut) -> Tensor:
    """Return the positions of a rank's tokens as the model counts them. If ranks have other rows, or other chunks of
    them, all ranks raise.
    """
    axis, length = cut.axis, positions.shape[-1] * cut.axis.size
    if length % cut.chunks.num == 0:
        places = places_of(cut.chunks.runs(axis.rank, length)).to(positions.device)
        expected = places if spans is None else places - spans[..., 0].index_select(-1, places)
        digest = digest + ((positions - expected) * (places + 1)).sum(-1)
    what = f"the rows whose sequences ranks of {axis.name!r} share, cut into the chunks of zerofn.parallel.context,"
    (digest,) = Linear.apply(CheckedSame(axis, what), digest)
    positions = positions + 0 * digest.unsqueeze(-1)  # adds nothing
    if cut.ways.padding is None:
        return positions
    if spans is not None:
        raise ValueError(f"{name} derives positions from padding tokens, so a row may contain only one document.")
    return _counted_places(ids, positions, cut.ways.padding, cut)


def _counted_places(ids: Tensor, places: Tensor, padding: int, cut: _Cut) -> Tensor:
    """Return the positions of a rank's tokens [B, s] as models of RoBERTa's kind count them: the first token that is no
    padding has padding + 1, and padding itself has `padding`. `places`: of the tokens in their rows.
    """
    (parts,) = Linear.apply(AllGather(cut.axis), (ids != padding).long())
    counts = cut.chunks.whole(parts.unflatten(-1, (cut.axis.size, -1)).movedim(-2, 0))
    return (counts.cumsum(-1) * counts + padding).gather(-1, places)


def _counted(model: Any, inputs: dict[str, Any], items_per_row: Tensor | None, axis: Axis) -> dict[str, Any]:
    """Return what a loss of transformers needs to divide by: the ranks' share of the row's labels that count."""
    shifts = getattr(model, "loss_type", None) not in _LABELS_AS_THEY_ARE
    if items_per_row is None or shifts == (inputs.get("shift_labels") is None):
        raise ValueError(
            f"{type(model).__name__}: its loss needs labels that {'are' if shifts else 'are not'} shifted before the "
            f"split: write split_sequence(batch, mesh, shift={shifts}), with the labels in the batch."
        )
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    total = items_per_row.sum().to(torch.float64 if wide else torch.float32)
    return {"num_items_in_batch": total / axis.size}
