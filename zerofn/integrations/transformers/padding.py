"""Batches of rows that differ in length: as long on every rank, and of few lengths over a run.

Collators pad a batch to its own longest row. One step of all ranks has one shape, and each new shape is a new
capture. Padding is added on the right, where a collator's is, and is masked. Where that isn't neutral, a batch stays as
the collator made it: each rank then captures its own length.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import zerofn

from .evaluation import mapped
from .per_token import PerToken, device_of, hashed, source_of

MULTIPLE = 16  # lengths but a run's first are multiples of this
_SOURCE = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_KNOWN = (*_SOURCE, "decoder_input_ids", "decoder_attention_mask", "labels")
_UNKNOWN, _RIGHT, _LEFT = range(3)
log = logging.getLogger("zerofn")


class Kind(NamedTuple):
    """Of a microbatch. `shapes`: a number for each rank's, without the lengths that `Padding.as_long` makes equal.
    `longer`: whether it may be padded.
    """

    shapes: tuple[int, ...]
    longer: bool


class _Learned:
    """What earlier batches have shown. The same on all ranks."""

    side = _UNKNOWN
    said_why = False


class Padding:
    """`padding(inputs) -> inputs`, longer where other ranks' are. `processor`: the tokenizer, whose token and side for
    padding are taken; `ignored`: the label that counts in no loss; `masks`: other inputs that are 0 where nothing
    counts; `multiple`: what lengths are rounded up to, 1 to leave batches as they are. Of the last call, `added`: how
    many positions of a row it has added, summed over ranks; `said`: the numbers that it was given on the ranks; `kind`:
    a `Kind`. All ranks must call it.
    """

    def __init__(
        self, model: Any, processor: Any, ignored: int, masks: Sequence[str] = (), multiple: int = MULTIPLE
    ) -> None:
        config = getattr(model, "config", None)
        token = getattr(processor, "pad_token_id", None)
        token = token if token is not None else getattr(config, "pad_token_id", None)
        values = {"input_ids": token or 0, "decoder_input_ids": token or 0, "labels": ignored}
        self._values = {name: values.get(name, 0) for name in (*_KNOWN, *masks)}
        self.added = 0
        self.said: list[int] = []
        self.kind = Kind((), False)
        self._processors_side = _LEFT if getattr(processor, "padding_side", "right") == "left" else _RIGHT
        bare = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._causal = type(bare).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        self._most: int | None = getattr(config, "max_position_embeddings", None)
        self._multiple = multiple
        self._learned = _Learned()
        self._first: tuple[int, ...] | None = None
        self._per_token = PerToken(frozenset(self._values))

    def twin(self) -> Padding:
        """Return one for other batches of the same trainer, whose lengths are theirs."""
        other = copy.copy(self)
        other._first, other._per_token = None, PerToken(frozenset(self._values))
        return other

    def __call__(self, inputs: Mapping[str, Any], said: int = 0) -> dict[str, Any]:
        """Return the inputs, padded. Raises `ValueError` where it isn't clear what of them is one for each token."""
        ours = [_length(inputs.get(name)) for name in self._values]
        beside = len(self._per_token.entries(inputs))
        numbers = (*ours, said, self._kind(inputs, False), self._kind(inputs, True), beside, _UNKNOWN)
        mine = torch.tensor([numbers], device=device_of(inputs))
        mine[0, -1] = _side(inputs.get("attention_mask"))
        found = zerofn.collectives.all_gather(mine).tolist()
        sides, besides, without, kinds, self.said = ([x.pop() for x in found] for _ in range(5))
        self.added = 0
        longest = tuple(map(max, zip(*found, strict=True)))
        if why := self._why_not(sides, found):
            self._say_once(why, any(tuple(x) != (self._first or longest) for x in found))
            self._first = self._first or longest
            self.kind = Kind(tuple(kinds), False)
            return dict(inputs)
        self.kind = Kind(tuple(self._per_token.agree(inputs, max(besides), without)), True)
        self._first = self._first or longest
        # By length, not by entry: what is equally long stays so, and labels of one width keep it.
        has_positions = longest[list(self._values).index("position_ids")] > 0
        longest = tuple(x if x in self._first else self._rounded(x, has_positions) for x in longest)
        missing = {name: n - x for name, n, x in zip(self._values, longest, ours, strict=True) if x}
        self.added = sum(longest[0] - x[0] for x in found)
        if any(0 < a < b for x in found for a, b in zip(x[:2], longest, strict=False)):
            self._per_token.check()
        return self._longer(inputs, missing)

    def as_long(self, micro: Sequence[Mapping[str, Any]], kinds: Sequence[Kind]) -> list[dict[str, Any]]:
        """Return the microbatches of an update, all as long as the longest of them if they may be padded. A step of one
        length is captured once; one of several lengths once for every sequence of lengths, 9 times for 2 microbatches
        of 3 lengths. `added` counts what is added here, too.
        """
        if not all(x.longer for x in kinds):
            return [dict(x) for x in micro]
        longest = {name: max(_length(x.get(name)) for x in micro) for name in self._values}
        found = []
        for x in micro:
            missing = {name: n - own for name, n in longest.items() if (own := _length(x.get(name)))}
            self.added += missing.get("input_ids", 0) * len(self.kind.shapes)
            if any(missing.get(name) for name in _SOURCE):
                self._per_token.check(x)
            found.append(self._longer(x, missing))
        return found

    def cut(self, outputs: Any, inputs: Mapping[str, Any], padded: Mapping[str, Any]) -> Any:
        """Return a model's outputs for `padded` without what `inputs` did not have."""
        return mapped(lambda name, x: _cut(x, *_sides(name, inputs, padded)), outputs)

    def _why_not(self, sides: Sequence[int], lengths: Sequence[Sequence[int]]) -> str | None:
        """Return why batches may not be padded; None if they may. `sides`, `lengths`: of all ranks."""
        self._learned.side = max(sides) or self._learned.side
        if self._multiple == 1:
            return "pad_to_multiple_of=1"
        if (self._learned.side or self._processors_side) == _LEFT:
            return "they are padded on the left, and more padding would shift positions"
        mask = list(self._values).index("attention_mask")
        if not self._causal and not all(x[mask] for x in lengths):
            return "they have no attention_mask that could mask more padding"
        return None

    def _say_once(self, why: str, differs: bool) -> None:
        if differs and self._multiple > 1 and not self._learned.said_why:
            self._learned.said_why = True
            if zerofn.rank() == 0:
                log.warning(
                    f"Trainer: batches keep the lengths that the collator makes, because {why}. Each new length needs "
                    "a new capture. Pad to a few lengths, for example with pad_to_multiple_of=16 in the collator."
                )

    def _kind(self, inputs: Mapping[str, Any], without: bool) -> int:
        """Return a number of the shapes of inputs, `without` the lengths that may be made equal."""
        beside = self._per_token.entries(inputs) if without else ()
        shapes = [
            (name, x.dtype, tuple(x.shape)[: 1 if without and name in self._values and x.dim() == 2 else None])
            for name, x in sorted(inputs.items())
            if isinstance(x, Tensor) and name not in beside
        ]
        return hashed(shapes)

    def _rounded(self, length: int, has_positions: bool) -> int:
        """Return a length of few. Rows whose positions are said, packed documents, may be longer than any position, and
        have very many lengths: 8 between two powers of two remain.
        """
        multiple = max(self._multiple, 1 << max(0, (length - 1).bit_length() - 4)) if has_positions else self._multiple
        longer = -(-length // multiple) * multiple
        return longer if self._most is None or has_positions else max(length, min(longer, self._most))

    def _longer(self, inputs: Mapping[str, Any], missing: Mapping[str, int]) -> dict[str, Any]:
        """Return inputs with `missing` positions more."""
        beside = dict.fromkeys(self._per_token.padded(inputs), missing.get(source_of(inputs), 0))
        return {
            name: _padded(x, n, self._values.get(name, 0)) if (n := {**beside, **missing}.get(name, 0)) else x
            for name, x in inputs.items()
        }


def _padded(x: Tensor, missing: int, value: int) -> Tensor:
    return F.pad(x, (*(0, 0) * (x.dim() - 2), 0, missing), value=value)


def _cut(x: Tensor, before: int, after: int) -> Tensor:
    less = after - x.shape[1] if x.dim() > 1 else -1  # 1 for what is about next tokens
    return x[:, : before - less] if before != after and less in (0, 1) else x


def _side(mask: Any) -> int | Tensor:
    """Return the side on which rows of a batch are padded. A tensor stays on its device: nothing waits for it."""
    if not _length(mask) or not len(mask):
        return _UNKNOWN
    on_left = (mask[:, 0] == 0).any() & (mask[:, -1] != 0).all()
    return torch.where(on_left, _LEFT, torch.where((mask[:, -1] == 0).any(), _RIGHT, _UNKNOWN))


def _length(x: Any) -> int:
    return x.shape[1] if isinstance(x, Tensor) and x.dim() == 2 else 0


def _sides(name: str, inputs: Mapping[str, Any], padded: Mapping[str, Any]) -> tuple[int, int]:
    """Return (length before, length after) of the rows that an output is about."""
    about = ("decoder_input_ids", "labels", "input_ids") if not name.startswith("encoder_") else ("input_ids",)
    source = next((x for x in about if _length(inputs.get(x))), "")
    return _length(inputs.get(source)), _length(padded.get(source))
