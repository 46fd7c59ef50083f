"""Errors for mistakes in a tensor-parallel plan: where, what was expected, what to write instead.

Modules that no word can slice are refused when the plan is read. Whether a layer gets the input that it needs shows
only in the forward pass. A `Trail` notes which layers have left this rank a slice, and torch's own error names the
module that needed the whole.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from ..util.patterns import pattern_of
from ..util.user_line import OURS, at_line, library_prefixes
from .plan import Slice

_SHAPES = (RuntimeError, ValueError, IndexError, AssertionError)  # by which code says that sizes are wrong
_OF_SIZES = re.compile("size|shape|dim|broadcast|channel|element|feature|heads")


def is_transposed(part: nn.Module) -> bool:
    """Whether a linear layer has its weight as [in, out], as GPT-2's have."""
    return type(part).__name__ == "Conv1D"


def check_module(name: str, part: nn.Module, how: Slice, key: str) -> None:
    """Raise `ValueError` if a module is of a kind that its entry in the plan, `plan[key]`, cannot slice."""
    kind, weight = type(part).__name__, part._parameters.get("weight")
    if how.dim is None or how.kind not in ("linear", "embedding"):
        return
    if isinstance(part, nn.MultiheadAttention):
        raise ValueError(_whole_attention(name))
    if weight is None:
        raise ValueError(f"{name}: {kind} has no attribute 'weight' to slice. Name its parameter in the plan instead.")
    if how.kind == "linear" and isinstance(part, nn.Embedding):
        raise ValueError(
            f"{name}: {kind} is an embedding, but plan[{key!r}] is for linear layers. Write 'embedding_rowwise', which "
            "slices it by vocabulary, or 'embedding_colwise', which slices it by features."
        )
    if how.kind == "embedding" and isinstance(part, nn.Linear):
        raise ValueError(
            f"{name}: {kind} is a linear layer, but plan[{key!r}] is for embeddings. Write 'colwise' or 'rowwise', or "
            "'colwise_gather_output' for an LM head if all ranks need all logits."
        )
    if weight.dim() != 2:
        raise ValueError(
            f"{name}: expected a linear layer with a weight [out, in], got the weight {list(weight.shape)} of {kind}. "
            "Leave it out of the plan. If it stands between a 'colwise' and a 'rowwise' layer, and needs all features, "
            "write 'colwise_gather_output' for the first of these and 'rowwise_split_input' for the second. If it "
            "treats all heads or features alike, write 'replicated_with_grad_allreduce' for it."
        )


def check_attention(modules: Mapping[str, nn.Module], cut: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a parameter in torch's attention, which does not call its own layers. `cut`: by name."""
    for name, part in modules.items():
        if isinstance(part, nn.MultiheadAttention) and any(x.startswith(f"{name}." if name else "") for x in cut):
            raise ValueError(_whole_attention(name))


def _whole_attention(name: str) -> str:
    return (
        f"{name}: nn.MultiheadAttention computes with all of its weights at once and calls none of its layers, so "
        "ranks cannot have slices of them. Leave it out of the plan. Or write the attention yourself, with "
        "scaled_dot_product_attention and a linear layer for each of q, k, v and the output, and slice these layers."
    )


class Trail:
    """The layers that have left this rank a slice of their output, in the forward pass that is running.

    `left`: layer -> how much, in words, if no sum has followed yet; `before`: the same, if a sum has followed; `sums`:
    the layers that have returned a sum.
    """

    def __init__(self) -> None:
        self.left: dict[str, str] = {}
        self.before: dict[str, str] = {}
        self.sums: set[str] = set()

    def follow(self, name: str, forward: Callable[..., Any], how: Slice, sizes: tuple[int, ...]) -> Callable[..., Any]:
        """Return a layer's forward that notes what it leaves. `sizes`: of all ranks' slices."""

        def run(*args: Any, **kwargs: Any) -> Any:
            y = forward(*args, **kwargs)
            if how.output != "cut":
                self.sums.add(name)
                self.before.update(self.left)
                self.left.clear()
            elif how.dim is not None and isinstance(y, Tensor) and y.dim():
                self.left[name] = f"{name!r} leaves {y.shape[-1]} of its {sum(sizes)} features"
            return y

        return run

    def inside(self, name: str, words: Mapping[str, Slice]) -> dict[str, str]:
        """Return what has been left when a module's own code runs: since the last sum, or by its layers, of which one
        is still to leave a sum. `words`: what the plan says of modules.
        """
        awaited = (x for x, how in words.items() if how.output == "sum" and x not in self.sums)
        if self.left or all(x.rpartition(".")[0] != name for x in awaited):
            return self.left
        return {x: told for x, told in self.before.items() if x.rpartition(".")[0] == name}

    def clear(self) -> None:
        """Begin a forward."""
        self.left.clear()
        self.before.clear()
        self.sums.clear()


class Explained:
    """Turns errors of a model's forward pass into sentences about its plan. `words`: the plan's entries for modules;
    `cut`: those for parameters, by name.
    """

    def __init__(self, model: nn.Module, trail: Trail, words: Mapping[str, Slice], cut: Mapping[str, Any]) -> None:
        self._model, self._trail, self._words, self._cut = model, trail, words, cut

    def inside(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's forward. If a slice is the cause of an error, the error is a sentence about the plan."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._trail.clear()
            try:
                return forward(*args, **kwargs)
            except _SHAPES as error:
                fits = type(error) in _SHAPES and _OF_SIZES.search(str(error))
                told = self._told(error) if fits else None
                if told is None:
                    raise
                raise ValueError(told) from error

        return run

    def _told(self, error: Exception) -> str | None:
        names = {id(part): name for name, part in self._model.named_modules()}
        rows = list(_rows(error.__traceback__))
        if not rows or rows[-1].tb_frame.f_code.co_filename.startswith(OURS):
            return None  # a sentence of ours
        found = ((row, _self(row)) for row in reversed(rows))
        row, part = next(((row, x) for row, x in found if id(x) in names), (rows[0], self._model))
        name = names.get(id(part), "")
        what = _what(name, part, row, error)
        if (how := self._words.get(name)) is not None and how.kind == "linear":
            return self._of_cut(name, how, what)
        own = [x for x in self._cut if x.rpartition(".")[0] == name and name not in self._words]
        if own:
            return (
                f"{what} The plan slices its {', '.join(x.rpartition('.')[2] for x in own)}, but its code does not "
                "work with a slice. Change the code, or leave them out of the plan."
            )
        left = self._trail.inside(name, self._words)
        return _of_whole(name, part, what, left) if left else None

    def _of_cut(self, name: str, how: Slice, what: str) -> str | None:
        left = " and ".join(self._trail.left.values())
        if how.input == "cut" and not left:
            return (
                f"{what} By the plan it is 'rowwise' and needs a slice of the features, but it got all of them, as no "
                "layer before it is 'colwise'. Write 'colwise' for the linear layer before it, or "
                f"'rowwise_split_input' for {name!r}."
            )
        if how.input == "cut":
            return f"{what} By the plan it is 'rowwise' and needs a slice of the features; {left}."
        if left:
            return (
                f"{what} It needs all features, but got a slice: {left}. Write 'rowwise' for {name!r}, which takes "
                f"slices and returns their sum; or 'colwise_gather_output' for {_last(self._trail.left)}."
            )
        return None


def _of_whole(name: str, part: nn.Module, what: str, left: dict[str, str]) -> str:
    last = _last(left)
    what = f"{what} It got a slice of the features: {' and '.join(left.values())}. If it needs all of them,"
    if isinstance(part, nn.Linear) or is_transposed(part):
        return (
            f"{what} write 'rowwise' for {name!r}, which takes slices and returns their sum; or "
            f"'colwise_gather_output' for {last}."
        )
    if next(part.children(), None) is None:
        return (
            f"{what} write 'colwise_gather_output' for {last}; if a 'rowwise' layer follows, write "
            "'rowwise_split_input' for that layer."
        )
    heads = [x for x, n in vars(part).items() if type(n) is int and n > 1 and x.endswith(("head", "heads"))]
    change = f"{{{pattern_of(name)!r}: {{{heads[0]!r}: lambda n, ranks: n // ranks}}}}" if heads else ""
    numbers = f" If it reads {heads[0]}, pass the number of a rank: attributes={change}." if heads else ""
    return (
        f"{what} write 'colwise_gather_output' for {last}, or 'rowwise' for the linear layer that follows; or leave "
        f"the layers of {name or 'the model'} out of the plan.{numbers} If a weight holds several matrices, slice each "
        "of them: Slice(-2, parts=3, output='cut')."
    )


def _last(left: dict[str, str]) -> str:
    return repr(next(reversed(left)))


def _what(name: str, part: nn.Module, row: TracebackType, error: Exception) -> str:
    """Return where two shapes did not match, and torch's words."""
    file, number = row.tb_frame.f_code.co_filename, row.tb_lineno
    theirs = file.startswith(library_prefixes())
    where = "" if theirs else at_line(file, number)
    said = str(error).strip().splitlines() or [type(error).__name__]
    return f"{name or type(part).__name__} ({type(part).__name__}){where}: {said[0].rstrip('.')}."


def _self(row: TracebackType) -> Any:
    """Return the first argument of the function that was running."""
    code = row.tb_frame.f_code
    return row.tb_frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _rows(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
