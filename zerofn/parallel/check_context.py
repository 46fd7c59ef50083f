"""A test of transformers models: does a model on parts of sequences compute the same as on whole sequences?

We build a small model of the same class (`small_twin.py`), and run its ranks one after the other in this process.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.mesh import Axis
from ..util.context import inside
from ..util.process import the
from .chunks import Chunks
from .local_ranks import mesh_of, on_ranks, without_modes
from .sequence import split_sequence
from .small_twin import (
    LIMIT,
    NoTwin,
    difference,
    few_ranks,
    other_gradient,
    outputs_of,
    rows_of,
    small_twin,
    special_tokens,
)

log = logging.getLogger("zerofn")
_attended: ContextVar[list[None] | None] = ContextVar("attended", default=None)


@dataclass(frozen=True)
class Ways:
    """How a model treats positions and masks.

    `padding`: the number of the padding token if the model counts positions from it, as RoBERTa does; None if positions
    begin with 0. `makes_masks`: whether the model makes masks that hide nothing. `rehearsed`: whether it is a small
    twin under test.
    """

    padding: int | None = None
    makes_masks: bool = False
    rehearsed: bool = False


class ForeignMask(ValueError):
    """The model passed a mask to attention."""


class NotPerToken(ValueError):
    """A model returns a value for a row, not one for each of its tokens."""


class _Found(NamedTuple):
    out: Tensor  # [B, S, ...]
    grads: dict[str, Tensor]
    attended: int  # times


class _Known:
    """Results of earlier tests, since a planner asks for many meshes of one model."""

    def __init__(self) -> None:
        self.ways: dict[Any, Ways] = {}


def note_attention() -> None:
    """Count a call of attention over a split sequence, if a test counts calls."""
    counted = _attended.get()
    if counted is not None:
        counted.append(None)


def check_context(model: Any, axis: Axis, method: str, cut: Callable[[nn.Module, Axis, Ways], None]) -> Ways:
    """Return the `Ways` with which a model on parts of sequences computes the same as on whole ones.

    `cut`: lets a model compute with a rank's part. Raises `ValueError` if no way works. If no small twin can be made,
    nothing is tested, and the log says so.
    """
    parts = few_ranks(axis.size)
    key = type(model), model.config.to_json_string(use_diff=False), parts, method
    known = the(_Known).ways
    if key not in known:
        known[key] = _Check(model, axis.name, parts, cut).ways()
    return known[key]


class _Check:
    def __init__(self, model: Any, axis: str, parts: int, cut: Callable[[nn.Module, Axis, Ways], None]) -> None:
        self._model, self._axis, self._parts, self._cut = model, axis, parts, cut
        self._name = type(model).__name__

    @without_modes()
    def ways(self) -> Ways:
        """Try the ways, the plain one first."""
        try:
            self._twin = small_twin(self._model, self._parts)
            self._rows()
            (self._plain,) = on_ranks(1, lambda _: self._run(copy.deepcopy(self._twin), {"input_ids": self._ids}))
            if not self._plain.out.isfinite().all():
                raise NoTwin("the small model's outputs have NaN or inf")
        except NotPerToken:
            raise
        except NoTwin as error:
            why = str(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        else:
            return self._first_that_holds()
        log.warning(
            "context: %s was not tested on parts of rows, since no small model could be made (%s). Compare the loss on "
            "a mesh with the loss on one process.",
            self._name,
            why,
        )
        return Ways()

    def _first_that_holds(self) -> Ways:
        ways = Ways(rehearsed=True)
        try:
            wrong = self._wrong(ways)
        except ForeignMask:
            ways = Ways(makes_masks=True, rehearsed=True)
            wrong = self._wrong(ways)
        if wrong and self._padding is not None:
            counting = Ways(self._padding, ways.makes_masks, True)
            ways, wrong = counting, self._wrong(counting)
        if wrong:
            raise ValueError(f"context: {self._name} {wrong}")
        return Ways(ways.padding, ways.makes_masks)

    def _rows(self) -> None:
        """Make rows of tokens, in whose middle are those with a meaning."""
        self._ids = rows_of(self._twin, 8 * self._parts)
        for k, x in enumerate(special_tokens(self._twin)[: 4 * self._parts]):
            self._ids[1, 3 + k] = x
        config: Any = self._twin.config
        padding = getattr(config.get_text_config(), "pad_token_id", None)
        self._padding = padding if isinstance(padding, int) else None

    def _run(self, model: Any, batch: dict[str, Tensor], weights: Callable[[Tensor], Tensor] = lambda x: x) -> _Found:
        counted: list[None] = []
        with inside(_attended, counted):
            out = self._tokens_of(model(**batch), batch["input_ids"])
        numbers = torch.Generator().manual_seed(3)
        whole = torch.randn(*self._ids.shape, *out.shape[2:], generator=numbers, dtype=torch.float64)
        names, params = zip(*((n, x) for n, x in model.named_parameters() if x.requires_grad), strict=True)
        grads = torch.autograd.grad((out * weights(whole)).sum(), params, allow_unused=True)
        found = {n: x.new_zeros(x.shape) if g is None else g for n, x, g in zip(names, params, grads, strict=True)}
        return _Found(out.detach(), found, len(counted))

    def _tokens_of(self, out: Any, ids: Tensor) -> Tensor:
        """Return what a model says of each token: logits, or hidden states."""
        found = outputs_of(out)
        if not found or found[0].shape[:2] != ids.shape:
            shape = list(found[0].shape) if found else "nothing"
            raise NotPerToken(
                f"context: {self._name} returns {shape} for tokens {list(ids.shape)}, but a rank has only parts of "
                "rows: use a model that returns a value for each token."
            )
        return found[0]

    def _on(self, size: int, ways: Ways) -> Callable[[], list[_Found]]:
        """Return what runs the twin on ranks; raise what cutting it raises."""
        meshes = [mesh_of(self._axis, size, rank) for rank in range(size)]
        models = [copy.deepcopy(self._twin) for _ in meshes]
        for model, mesh in zip(models, meshes, strict=True):
            self._cut(model, mesh.axis(self._axis), ways)

        def run(rank: int) -> _Found:
            batch = split_sequence({"input_ids": self._ids}, meshes[rank])
            return self._run(models[rank], batch, lambda x: Chunks.early_and_late(size).part(x, rank, 1))

        return lambda: on_ranks(size, run)

    def _wrong(self, ways: Ways) -> str:
        """Return what is wrong with a model that goes these ways, or nothing."""
        on_one, on_parts = self._on(1, ways), self._on(self._parts, ways)
        try:
            (whole,), found = on_one(), on_parts()
        except ForeignMask:
            raise
        except Exception as error:
            return f"cannot compute with parts of sequences: {error}"
        if whole.attended != found[0].attended:
            return (
                f"calls attention {whole.attended} times for a whole row, but {found[0].attended} times for a part of "
                "it, so parts of rows give different values. Use other axes."
            )
        if not (off := difference(whole.out, self._plain.out)) <= LIMIT:  # also where it is no number
            return (
                "needs a kind of attention that is neither full nor causal: with these two, its outputs on a whole row "
                f"are off by {off:.1g} of the largest. Use other axes."
            )
        each = [Chunks.early_and_late(self._parts).part(self._plain.out, rank, 1) for rank in range(self._parts)]
        off = max(difference(x.out, y) for x, y in zip(found, each, strict=True))
        if not off <= LIMIT:
            return (
                f"computes different values on parts of rows: its outputs are off by {off:.1g} of the largest of whole "
                "rows. Its tokens interact outside attention, or its positions do not count from 0. Use other axes."
            )
        total = {name: torch.stack([one.grads[name] for one in found]).sum(0) for name in self._plain.grads}
        other = other_gradient(self._plain.grads, total)
        return f"computes a different gradient of {other} on parts of rows. Use other axes." if other else ""
