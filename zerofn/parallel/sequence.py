"""A rank's part of each sequence of a batch: tokens, labels, positions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..comm.mesh import Axis, Mesh
from ..sparse.rows import spans_of
from ..util.arguments import checked
from .chunks import Chunks, chunks_for

_SPREAD = 0x9E3779B97F4A7C1, 0x94D049BB133111E  # so that places which are near get numbers which are not
IGNORED = -100  # the label of a token that counts for no loss


@checked()
def split_sequence(
    batch: Mapping[str, Tensor], mesh: Mesh, *, shift: bool = True, chunks: Chunks | None = None
) -> dict[str, Tensor]:
    """Split the sequences of a batch for the ranks of the mesh's axis `context`.

    `batch`: `input_ids` [B, S], and all other entries with the shape [B, S], such as `labels` and `token_type_ids`. All
    ranks of the axis must pass the same rows. With n ranks along `context`, S must be a multiple of 2n: each row is cut
    into 2n chunks, and rank r gets the chunks r and 2n - 1 - r, so that all ranks have equal work under a causal mask.
    `shift`: whether the label of a token is that of the next token; labels are shifted before the split. `chunks`:
    another way to distribute chunks (`balanced_chunks`); its number of chunks must divide S. Pass the same chunks to
    `attention` or `context`.

    -> the rank's parts [B, S / n], and with them

    - `position_ids` [B, S / n]: the tokens' positions in the whole sequence, or in their documents;
    - if `position_ids` of the batch start again within a row, so that the row has several documents: `document_spans`
      int32 [B, S, 2], for each token of the whole row the first position of its document, and one past its last
      position;
    - with labels: `shift_labels`, equal to the returned `labels` (with `shift`), and `items_per_row` [B]: the number of
      labels of the whole row that count for a loss, those that are not -100;
    - `row_digest` [B]: a checksum of all entries of the row, by which ranks check that they have the same rows.

    A rank's loss is n * (sum of its tokens' losses) / items_per_row.sum(); the mean of these over ranks is the loss
    of whole sequences. `zerofn.parallel.context` lets transformers' models compute it. Raises `ValueError` for a length
    that the chunks do not divide, for padding (`attention_mask` with zeros), and for `position_ids` that neither
    increase by 1 nor start again with 0.

    >>> mesh = Mesh.make(data=-1)
    >>> sorted(split_sequence({"input_ids": torch.tensor([[5, 6, 7, 8]])}, mesh))
    ['input_ids', 'position_ids', 'row_digest']
    """
    if "input_ids" not in batch:
        raise ValueError(f"split_sequence: expected 'input_ids' in the batch, got only {', '.join(map(repr, batch))}.")
    ids = batch["input_ids"]
    along = mesh.tokens
    size, dealt = ids.shape[-1], chunks_for(along.size, chunks, "split_sequence")
    _check_length(size, along, 2 * along.size if chunks is None else dealt.num)
    _refuse_padding(batch, ids)
    parts = {k: x for k, x in batch.items() if k not in ("attention_mask", "position_ids")}
    spans = _spans(batch.get("position_ids"), ids)
    if spans is not None:
        parts["position_ids"] = batch["position_ids"]
    for name, x in parts.items():
        if x.shape != ids.shape:
            raise ValueError(
                f"split_sequence: expected {name!r} {list(ids.shape)} like 'input_ids', got {list(x.shape)}."
            )
    digests = [_digest(x, number) for number, (_, x) in enumerate(sorted(parts.items()))]
    more = {"row_digest": torch.stack(digests).sum(0)}
    if spans is None:
        parts["position_ids"] = torch.arange(size, device=ids.device).expand_as(ids)
    else:
        more["document_spans"] = spans
    if "labels" in parts:
        if shift:
            parts["labels"] = shifted(parts["labels"])
            parts["shift_labels"] = parts["labels"]
        more["items_per_row"] = (parts["labels"] != IGNORED).sum(-1)
    return {k: dealt.part(x, along.rank) for k, x in parts.items()} | more


def _check_length(size: int, along: Axis, pieces: int) -> None:
    if size % pieces:
        what = f"{along.size} ranks along {along.name!r}" if along.size > 1 else "the chunks"
        raise ValueError(
            f"split_sequence: {what} cannot divide sequences of {size} tokens equally. Pad them to "
            f"{size + -size % pieces} tokens, with the label {IGNORED} for padding, or shorten them."
        )


def shifted(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return for each token [..., S] the label of the next one; the last one has none."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignored)


def _digest(x: Tensor, number: int) -> Tensor:
    """[B, S] -> [B]: the sum of the bits of all entries, each times a number of its place. `number`: of the tensor."""
    places = torch.arange(1, x.shape[-1] + 1, device=x.device) + (number << 32)
    for spread in _SPREAD:  # whole numbers, which wrap
        places = places * spread
        places = places ^ (places >> 31)
    bits = x.double().view(torch.int64) if x.is_floating_point() else x.long()
    return (bits * places).sum(-1)


def _refuse_padding(batch: Mapping[str, Tensor], ids: Tensor) -> None:
    mask = batch.get("attention_mask")
    if mask is not None and (mask.shape != ids.shape or not bool(mask.all())):
        raise ValueError(
            "split_sequence: attention_mask masks tokens, but attention over a split sequence cannot mask them. "
            "Padding at the end of a causal row needs no mask: leave attention_mask out, and give padding the label "
            f"{IGNORED}."
        )


def _spans(positions: Tensor | None, ids: Tensor) -> Tensor | None:
    """Return of each token the first one of its document and the one behind the last, int32 [B, S, 2]; None if each row
    is one document. `positions`: of tokens in their documents.
    """
    places = torch.arange(ids.shape[-1], device=ids.device)
    if positions is None or bool((positions == places).all()):
        return None
    steps, begins = positions.diff(dim=-1), positions[..., 1:] == 0
    if positions.shape != ids.shape or bool((positions[..., 0] != 0).any() or ((steps != 1) & ~begins).any()):
        raise ValueError(
            f"split_sequence: expected position_ids {list(ids.shape)} like 'input_ids', which begin with 0 and "
            f"increase by 1, or start again with 0 where a document begins; got {list(positions.shape)}: "
            f"{positions.tolist()}."
        )
    return spans_of((places - positions).contiguous())
