"""A rank's part of each sequence of a batch: tokens, labels, positions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..comm.mesh import Mesh
from ..util.arguments import checked

_SPREAD = 0x9E3779B97F4A7C1, 0x94D049BB133111E  # so that places which are near get numbers which are not
IGNORED = -100  # the label of a token that counts for no loss


@checked()
def split_sequence(batch: Mapping[str, Tensor], mesh: Mesh, *, shift: bool = True) -> dict[str, Tensor]:
    """Cut the sequences of a batch for the ranks of the mesh's axis `context`.

    `batch`: `input_ids` [B, S], and whatever else has the shape [B, S], such as `labels` and `token_type_ids`: the same
    rows on all ranks of the axis. S is a multiple of 2 * size: a rank gets chunk number r and chunk number
    2 * size - 1 - r of 2 * size, so that all have the same work under a causal mask. `shift`: whether a token's label
    is that of the next one, which is looked up before the cut.

    -> the rank's parts [B, S / size], and beside them

    - `position_ids` [B, S / size]: the tokens' places in the whole sequence;
    - with labels: `shift_labels`, the same as `labels` now are (with `shift`), and `items_per_row` [B]: how many labels
      of the whole row count for a loss, those that are not -100;
    - `row_digest` [B]: a number that follows from all that was given of the row, by which ranks see that they have the
      same rows.

    A rank's loss is size * (sum of its tokens' losses) / items_per_row.sum(): its mean over ranks is that of whole
    sequences. `zerofn.parallel.context` lets transformers' models compute it. Raises `ValueError` for a length that
    ranks cannot share, for padding (`attention_mask` with zeros) and for several sequences in one row (`position_ids`
    that begin anew).

    >>> mesh = Mesh.make(data=-1)
    >>> sorted(split_sequence({"input_ids": torch.tensor([[5, 6, 7, 8]])}, mesh))
    ['input_ids', 'position_ids', 'row_digest']
    """
    if "input_ids" not in batch:
        raise ValueError(f"split_sequence: the batch has no 'input_ids', only {', '.join(map(repr, batch))}.")
    ids = batch["input_ids"]
    along = mesh.tokens
    size, num = ids.shape[-1], along.size
    if size % (2 * num):
        longer, ranks = size + -size % (2 * num), f"{num} ranks of {along.name!r}" if num > 1 else "1 rank"
        raise ValueError(
            f"split_sequence: {ranks} cannot share sequences of {size} tokens: pad them to {longer},"
            f" with labels {IGNORED}, or cut them."
        )
    _refuse_padding(batch, ids)
    parts = {k: x for k, x in batch.items() if k not in ("attention_mask", "position_ids")}
    for name, x in parts.items():
        if x.shape != ids.shape:
            raise ValueError(f"split_sequence: {name!r} is {list(x.shape)}, and 'input_ids' {list(ids.shape)}.")
    digests = [_digest(x, number) for number, (_, x) in enumerate(sorted(parts.items()))]
    more = {"row_digest": torch.stack(digests).sum(0)}
    parts["position_ids"] = torch.arange(size, device=ids.device).expand_as(ids)
    if "labels" in parts:
        if shift:
            parts["labels"] = shifted(parts["labels"])
            parts["shift_labels"] = parts["labels"]
        more["items_per_row"] = (parts["labels"] != IGNORED).sum(-1)
    return {k: part_of_row(x, along.rank, num) for k, x in parts.items()} | more


def shifted(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return for each token [..., S] the label of the next one; the last one has none."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignored)


def part_of_row(x: Tensor, rank: int, num: int, dim: int = -1) -> Tensor:
    """Return the two chunks that a rank of `num` has of the tokens, which are counted along `dim`."""
    if num == 1:
        return x
    chunks = x.chunk(2 * num, dim)
    return torch.cat([chunks[rank], chunks[2 * num - 1 - rank]], dim)


def _digest(x: Tensor, number: int) -> Tensor:
    """[B, S] -> [B]: the sum of the bits of all entries, each times a number of its place. `number`: of the tensor."""
    places = torch.arange(1, x.shape[-1] + 1, device=x.device) + (number << 32)
    for spread in _SPREAD:  # whole numbers, which wrap
        places = places * spread
        places = places ^ (places >> 31)
    bits = x.double().view(torch.int64) if x.is_floating_point() else x.long()
    return (bits * places).sum(-1)


def _refuse_padding(batch: Mapping[str, Tensor], ids: Tensor) -> None:
    mask, places = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and (mask.shape != ids.shape or not bool(mask.all())):
        raise ValueError(
            "split_sequence: attention_mask leaves tokens out, and attention over a cut sequence looks at all of them. "
            f"Under a causal mask padding at the end needs no mask: leave it out, and give padding the label {IGNORED}."
        )
    if places is not None and not bool((places == torch.arange(ids.shape[-1], device=ids.device)).all()):
        raise ValueError(
            "split_sequence: position_ids do not count from 0: several sequences in one row are not told apart in "
            "attention over a cut sequence. Give each a row of its own."
        )
