"""`Wire`: in which form units travel between ranks, along each axis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from ..comm.block_wire import name_of
from ..comm.mesh import Axis, Mesh
from ..geometry.layout import Leaf, Unit
from ..ops.wire_codes import BLOCKS
from ..util.arguments import check_fields, known_fields, told
from ..util.errors import nearest

WireWord = Literal["bf16", "fp8", "int8"]
GatherWord = Literal["bf16", "fp8", "int8", "int4"]
RoundingWord = Literal["nearest", "stochastic"]
GATHERS: tuple[GatherWord, ...] = get_args(GatherWord)
REDUCES: tuple[WireWord, ...] = get_args(WireWord)
CODED = (torch.float32, torch.bfloat16, torch.float16)
NEAREST, STOCHASTIC = ROUNDINGS = get_args(RoundingWord)


@known_fields
@dataclass(frozen=True)
class Wire:
    """The codecs for what ranks send: gathered parameters and reduced gradients.

    - `gather`: "bf16", "fp8", "int8", "int4", or None for uncompressed values.
    - `reduce`: the same, but "int4" only with `feedback`.
    - `block`: how many elements share a scale in "fp8", "int8" and "int4": 128, 256, 512, 1,024 or 2,048.
    - `smallest`: leaves of fewer elements, such as norms and biases, are sent uncompressed, and so are units of
      integers or of float64.
    - `rounding`: "nearest", or "stochastic" for gradients in blocks: each element becomes the code below or above it,
      with probabilities such that the expected value is the element (Gupta et al., ICML 2015). Draws come from the
      step's key, and differ between ranks and microbatches: `TrainState.value_and_grad` uses this key, and
      `value_and_grad` has the argument `rng`. Values without a key are rounded to nearest: parameters, and values sent
      by `scatter` and by derivatives through `gather`.
    - `feedback`: the rounding error of a gradient is added to the next gradient (Karimireddy et al., arXiv:1901.09847).
      A `zerofn.TrainState` stores the errors, 4 bytes for each parameter on each rank at every stage, and gradients are
      reduced once per step.

    "bf16" rounds float32 values. The other codecs send 8 or 4 bits for each element, and one bfloat16 scale for each
    block. "int8" and "int4" are integers, scaled by the largest magnitude of the block; "fp8" is float8 e4m3 times a
    power of two. A block with a NaN, an inf or a number above 2.97e38 ("fp8"), 1.69e38 ("int8") or 1.49e38 ("int4")
    arrives as NaN, and a block of numbers below 1e-28 as zeros.

    Raises `ValueError` for an unknown codec, rounding or block size; for stochastic rounding if `reduce` is not a block
    codec; for feedback without `reduce`; and for feedback together with stochastic rounding. Raises `TypeError` for an
    argument of the wrong type.

    On a command line or in a file, write a `Wire` as "gather=int8,reduce=fp8".

    >>> Wire(gather="int8", reduce="fp8")
    zerofn.Wire(gather='int8', reduce='fp8')
    """

    gather: GatherWord | None = None
    reduce: GatherWord | None = None
    block: int = 256
    smallest: int = 16_384
    rounding: RoundingWord = "nearest"
    feedback: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        reduces = GATHERS if self.feedback else REDUCES
        for what, form, known in (("gather", self.gather, GATHERS), ("reduce", self.reduce, reduces)):
            if form == "sign":
                raise ValueError(
                    f"zerofn.Wire: {what}='sign' works only inside an optimizer that adds the error of the signs to "
                    "the next gradient. Write tx=zerofn.optim.onebit_adam(learning_rate, freeze_step=...)."
                )
            if form is not None and form not in known:
                near = "'int8'" if form == "int4" else repr(nearest(form, known, 1, 0.0)[0])
                why = (
                    "a sum needs more than 4 bits, or feedback=True"
                    if form == "int4"
                    else f"the codecs are {', '.join(known)} and None"
                )
                raise ValueError(f"zerofn.Wire: {what}={form!r} is not possible: {why}. Write {what}={near}.")
        if self.block not in BLOCKS:
            raise ValueError(
                f"zerofn.Wire: block={self.block} is not possible, because shards must divide into whole blocks. Write "
                f"one of {', '.join(map(str, BLOCKS))}."
            )
        if self.smallest < 0:
            raise ValueError(f"zerofn.Wire: smallest={self.smallest} elements cannot be negative; write smallest=0.")
        self._check_rounding()

    def _check_rounding(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise ValueError(
                f"zerofn.Wire: rounding={self.rounding!r} is not known; write "
                f"rounding={nearest(self.rounding, ROUNDINGS, 1, 0.0)[0]!r}."
            )
        if self.feedback and self.reduce is None:
            raise ValueError(
                "zerofn.Wire: feedback=True adds the rounding error of a gradient to the next one, but reduce=None "
                "sends gradients without rounding. Write reduce='int8', or leave feedback out."
            )
        if self.feedback and self.rounding == STOCHASTIC:
            raise ValueError(
                "zerofn.Wire: feedback=True needs rounding='nearest', which has the smallest error to feed back. Write "
                "rounding='nearest', or leave feedback out."
            )
        if self.rounding == STOCHASTIC and self.reduce not in REDUCES[1:]:
            sent = "in bfloat16, rounded to nearest" if self.reduce else "without a codec"
            raise ValueError(
                "zerofn.Wire: rounding='stochastic' works only for gradients in 8-bit codes, but with "
                f"reduce={self.reduce!r} gradients are sent {sent}. Write reduce='int8' or reduce='fp8', or leave "
                "rounding out."
            )

    def __repr__(self) -> str:
        shown = [f"{k}={v!r}" for k, v in vars(self).items() if v != getattr(Wire, k)]
        return f"zerofn.Wire({', '.join(shown)})"

    def __str__(self) -> str:
        drawn = " with stochastic rounding" if self.rounding == STOCHASTIC else " with feedback" * self.feedback
        if self.gather == self.reduce and not drawn:
            return str(self.gather)
        return f"{self.gather or 'none'} to gather, {self.reduce or 'none'} to reduce{drawn}"

    def codec(self, unit: Unit, dtype: torch.dtype, what: str, part: int) -> str:
        """Return the codec (`comm.wire`) by which a unit in `dtype`, or a part of it, is sent; "" for uncompressed
        values.

        `what`: "gather" or "reduce". `part`: the number of elements of one rank's part, which blocks must divide.
        """
        form = self.gather if what == "gather" else self.reduce
        if form == "bf16":
            return "bf16" if dtype is torch.float32 else ""
        if form is None or dtype not in CODED:
            return ""
        return _named(unit, form, block_in(part, self.block), self.smallest)

    def gathers_in_blocks(self, dtype: torch.dtype) -> bool:
        """Return whether blocks of a unit in a dtype are gathered as codes, if it has a leaf that is large enough."""
        return self.gather not in (None, "bf16") and dtype in CODED


def block_in(part: int, block: int) -> int:
    """Return the size of blocks, at most `block`, that divide a part of a unit: parts are of whole blocks of 128."""
    return next(x for x in reversed(BLOCKS) if x <= block and part % x == 0)


def codec_of(unit: Unit, form: str, block: int, codes: Callable[[Leaf], bool]) -> str:
    """Return the codec of a unit in which blocks with a part of a leaf that `codes` leaves out travel as they are."""
    plain = [(x.offset, x.stop) for x in unit.leaves if not codes(x)]
    return name_of(form, block, unit.size, plain) if len(plain) < len(unit.leaves) else ""


@lru_cache(maxsize=4096)
def _named(unit: Unit, form: str, block: int, smallest: int) -> str:
    return codec_of(unit, form, block, lambda leaf: leaf.numel >= smallest)


class WireByAxis(Mapping[str, Wire]):
    """A `Wire` for each axis that has one, as `shard(wire={...})` says it."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        odd = next((name for name in given if not isinstance(name, str)), None)
        if odd is not None:
            raise TypeError(
                "wire: the keys of a dict must be names of mesh axes, such as {'replicate': 'int8'}; got "
                f"{told(odd)}."
            )
        self._given = {name: wire for name, x in given.items() if (wire := wire_of(x)) is not None}

    def __getitem__(self, name: str) -> Wire:
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __hash__(self) -> int:
        return hash(frozenset(self._given.items()))

    def __repr__(self) -> str:
        return repr(self._given)

    def __str__(self) -> str:
        return ", ".join(f"{wire} along {name}" for name, wire in self.items())


Given = Wire | WireByAxis | None


def given(wire: Any) -> Given:
    """Return what `shard(wire=...)` means. Raises `TypeError` or `ValueError` for anything else."""
    return wire if isinstance(wire, WireByAxis) else WireByAxis(wire) if isinstance(wire, Mapping) else wire_of(wire)


def hashable(wire: Any) -> Any:
    """Return what `shard(wire=...)` is given so that it is a key: a dict as a `WireByAxis`."""
    return WireByAxis(wire) if isinstance(wire, Mapping) else wire


def wire_of(wire: Any) -> Wire | None:
    """Return a `Wire` for a word, a string such as "gather=int8,reduce=fp8", a `Wire` or None."""
    if wire is None or isinstance(wire, Wire):
        return wire
    if not isinstance(wire, str):
        raise TypeError(
            f"wire: expected a word such as 'int8', a zerofn.Wire, a dict from axis to these, or None; got "
            f"{told(wire)}."
        )
    if "=" in wire:
        return _as_written(wire)
    if wire == "int4":
        raise ValueError(
            "wire='int4' works for gathers only, because sums of gradients need more than 4 bits. Write "
            "wire=zerofn.Wire(gather='int4', reduce='int8')."
        )
    if wire not in REDUCES:
        raise ValueError(
            f"wire={wire!r} is not known; did you mean {nearest(wire, REDUCES, 1, 0.0)[0]!r}? Leave wire out to send "
            "values without a codec."
        )
    return Wire(wire, wire)


def _as_written(text: str) -> Wire:
    """Return the `Wire` of a string "gather=int8,reduce=int4,feedback=true", as command lines have it."""
    found: dict[str, Any] = {}
    known = [x.name for x in fields(Wire)]
    for part in text.split(","):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in known:
            raise ValueError(
                f"wire={text!r} has {part!r}; expected one of {', '.join(known)}, as in wire='gather=int8,reduce=fp8'."
            )
        found[name] = _value(value)
    try:
        return Wire(**found)
    except TypeError as error:
        raise ValueError(f"wire={text!r}: {error}") from None


def _value(text: str) -> Any:
    """Return a number, a flag or None; what is none of these is a word."""
    try:
        return None if text.lower() == "none" else json.loads(text.lower())
    except json.JSONDecodeError:
        return text


def word_of(wire: Any) -> Any:
    """Return the word that means the same as a wire; itself if there is none."""
    form = wire.reduce if isinstance(wire, Wire) else None
    return form if form in REDUCES and wire == Wire(form, form) else wire


def along(wire: Given, axis: Axis) -> Wire | None:
    """Return the form in which units travel along an axis, perhaps one for several."""
    if not isinstance(wire, WireByAxis):
        return wire
    return next((wire.get(name) for name in axis.names), None)


def check_axes(wire: Given, mesh: Mesh) -> None:
    """Raise `ValueError` for an axis that a mesh lacks or along which no unit is sent, and for two forms of axes that
    are one transfer.
    """
    if not isinstance(wire, WireByAxis):
        return
    for name in wire:
        axis = mesh.axis(name)
        if not axis.kind.shards and not axis.kind.replicas:
            raise ValueError(
                f"shard: wire={{{name!r}: ...}} has no effect: wire encodes parameters and gradients, but along "
                f"{name!r} ranks exchange activations only. Leave this axis out."
            )
    for whole in (mesh.shards, mesh.shards_of_experts, mesh.replicas):
        forms = {name: wire.get(name) for name in whole.names if mesh.size(name) > 1}
        if len(set(forms.values())) > 1:
            one = dict.fromkeys(forms, word_of(next(x for x in forms.values() if x is not None)))
            raise ValueError(
                f"shard: one transfer goes over {' and '.join(map(repr, forms))} together, so both axes need the same "
                f"wire codec. Write wire={one}."
            )
