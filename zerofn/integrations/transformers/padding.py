"""Batches of rows that differ in length: as long on every rank, and of few lengths over a run.

Collators pad a batch to its own longest row. One step of all ranks has one shape, and each new shape is captured
anew. What is added here is what collators add: it is masked, and counts in no loss.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import zerofn

from .evaluation import mapped

STEP = 16  # lengths but a run's first are multiples of this
_SOURCE = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_KNOWN = (*_SOURCE, "decoder_input_ids", "decoder_attention_mask", "labels")


class Padding:
    """`padding(inputs) -> inputs`, longer where other ranks' are. `processor`: the tokenizer, whose token and side for
    padding are taken; `ignored`: the label that counts in no loss; `masks`: other inputs that are 0 where nothing
    counts. Of the last call, `added`: how many positions of a row it has added, summed over ranks; `said`: the numbers
    that it was given on the ranks; `kind`: a number of each rank's shapes but for lengths. All ranks must call it.
    """

    def __init__(self, model: Any, processor: Any, ignored: int, masks: Sequence[str] = ()) -> None:
        config = getattr(model, "config", None)
        token = getattr(processor, "pad_token_id", None)
        token = token if token is not None else getattr(config, "pad_token_id", None)
        values = {"input_ids": token or 0, "decoder_input_ids": token or 0, "labels": ignored}
        self._values = {name: values.get(name, 0) for name in (*_KNOWN, *masks)}
        self.added = 0
        self.said: list[int] = []
        self.kind: tuple[int, ...] = ()
        self._left = getattr(processor, "padding_side", "right") == "left"
        bare = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._causal = type(bare).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        self._most: int | None = getattr(config, "max_position_embeddings", None)
        self._first: tuple[int, ...] | None = None

    def __call__(self, inputs: Mapping[str, Any], said: int = 0) -> dict[str, Any]:
        """Return the inputs, padded. Raises `ValueError` where lengths differ and nothing masks what would be added."""
        ours = [_length(inputs.get(name)) for name in self._values]
        mine = torch.tensor([[*ours, said, self._kind(inputs)]], device=_device(inputs))
        found = zerofn.collectives.all_gather(mine).tolist()
        self.kind = tuple(x.pop() for x in found)
        self.said = [x.pop() for x in found]
        longest = tuple(map(max, zip(*found, strict=True)))
        self._first = self._first or longest
        masked, self.added = self._is_masked(inputs), 0
        if all(tuple(x) == longest for x in found) and (longest == self._first or not masked):
            return dict(inputs)
        if not masked:
            name, lengths = _first_difference(tuple(self._values), found)
            raise ValueError(
                f"Trainer: rows of {name} are {lengths} long on the ranks, and "
                "there is no attention_mask. Let the collator return one, or pad to one length (padding='max_length')."
            )
        if longest != self._first:
            longest = tuple(self._rounded(x) for x in longest)
        missing = {name: n - x for name, n, x in zip(self._values, longest, ours, strict=True) if x}
        self.added = sum(longest[0] - x[0] for x in found)
        return {name: self._padded(name, x, missing.get(name, 0)) for name, x in inputs.items()}

    def as_long(self, micro: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the microbatches of an update, all as long as the longest of them, where what is added is masked. A
        step of one length is captured once; one of several lengths once for every sequence of lengths, 9 times for
        2 microbatches of 3 lengths. `added` counts what is added here, too.
        """
        if not all(map(self._is_masked, micro)):
            return [dict(x) for x in micro]
        longest = {name: max(_length(x.get(name)) for x in micro) for name in self._values}
        for x in micro:
            if own := _length(x.get("input_ids")):
                self.added += (longest["input_ids"] - own) * len(self.kind)
        return [
            {name: self._padded(name, x, longest[name] - n if (n := _length(x)) and name in longest else 0)
             for name, x in inputs.items()}
            for inputs in micro
        ]  # fmt: skip

    def cut(self, outputs: Any, inputs: Mapping[str, Any], padded: Mapping[str, Any]) -> Any:
        """Return a model's outputs for `padded` without what `inputs` did not have."""
        return mapped(lambda name, x: self._cut(x, *_sides(name, inputs, padded)), outputs)

    def _kind(self, inputs: Mapping[str, Any]) -> int:
        """Return a number of the shapes of inputs, without the lengths that are made equal."""
        shapes = [
            (name, x.dtype, tuple(x.shape)[: 1 if name in self._values and x.dim() == 2 else None])
            for name, x in sorted(inputs.items())
            if isinstance(x, Tensor)
        ]
        return zlib.crc32(repr(shapes).encode())

    def _rounded(self, length: int) -> int:
        longer = -(-length // STEP) * STEP
        return longer if self._most is None else max(length, min(longer, self._most))

    def _is_masked(self, inputs: Mapping[str, Any]) -> bool:
        return _length(inputs.get("attention_mask")) > 0 or (self._causal and not self._left)

    def _padded(self, name: str, x: Any, missing: int) -> Any:
        if not missing:
            return x
        return F.pad(x, (missing, 0) if self._left else (0, missing), value=self._values[name])

    def _cut(self, x: Tensor, before: int, after: int) -> Tensor:
        less = after - x.shape[1] if x.dim() > 1 else -1  # 1 for what is about next tokens
        if before == after or less not in (0, 1):
            return x
        return x[:, after - before :] if self._left else x[:, : before - less]


def _length(x: Any) -> int:
    return x.shape[1] if isinstance(x, Tensor) and x.dim() == 2 else 0


def _device(inputs: Mapping[str, Any]) -> torch.device | None:
    return next((x.device for x in inputs.values() if isinstance(x, Tensor)), None)


def _first_difference(names: Sequence[str], found: list[list[int]]) -> tuple[str, str]:
    """Return (name, lengths in words) of what first differs between ranks."""
    columns = zip(names, zip(*found, strict=True), strict=True)
    name, lengths = next(x for x in columns if len(set(x[1])) > 1)
    *some, last = map(str, lengths)
    return name, f"{', '.join(some)} and {last}"


def _sides(name: str, inputs: Mapping[str, Any], padded: Mapping[str, Any]) -> tuple[int, int]:
    """Return (length before, length after) of the rows that an output is about."""
    about = ("decoder_input_ids", "labels", "input_ids") if not name.startswith("encoder_") else ("input_ids",)
    source = next((x for x in about if _length(inputs.get(x))), "")
    return _length(inputs.get(source)), _length(padded.get(source))
