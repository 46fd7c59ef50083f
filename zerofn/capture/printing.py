"""Values that become text while a step is captured: they are not known then, and are not printed again.

Text is made by the protocols that Python has for it: `repr`, `format`, JSON's encoder, and the conversion to a number
that `"%.3f" % x` asks for. The last one also serves arithmetic, where a value that is not known stays an error. So it
is answered only where nothing but text can come of it: by the instruction, or by the place in the source.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import json
import linecache
import logging
import math
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._torch_compat import TENSOR_TEXT, FakeTensor, data_dependent_errors
from ..util.patches import Patches, Replacement
from ..util.user_line import OURS, CodeLine, frames, is_users, library_prefixes

log = logging.getLogger("zerofn")

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # what .item() gives while a step is captured
_UNKNOWN = "<no value yet>"
_TEXT_OF = {"print", "str", "repr", "format", "ascii"}  # functions, and str's method, of which only text comes
_ASKED = {"__float__", "__int__", "__str__", "__repr__", "__format__"}
_PURE = {"abs", "float", "int", "round", "min", "max", *vars(math)}


class _Told:
    """The lines that were told, so that each is told once: a step may be captured several times."""

    _lines: ClassVar[set[CodeLine]] = set()

    def tell(self, what: str, frame: FrameType | None) -> bool:
        """Warn of the user's line that makes text, unless it is torch or ZeroFn itself that does so; return whether
        it is the user's.
        """
        passed = _outside_stand_ins(frame)
        if (maker := next(frames(passed), None)) is None or maker.file.startswith((OURS, *library_prefixes())):
            return False
        line = next((x for x in frames(passed) if is_users(x.file)), maker)
        if line not in self._lines:
            self._lines.add(line)
            log.warning(
                "%s:%d: %s is printed or formatted as text while the step is captured. It has no value yet, and later "
                "calls of the step do not print. Return it in the metrics, and print it after the step.",
                line.file,
                line.number,
                what,
            )
        return True


def _is_unknown(x: Any) -> bool:
    return isinstance(x, FakeTensor) or (isinstance(x, _NUMBERS) and not x.node.has_hint())


def _what(x: Any) -> str:
    return "a tensor" if isinstance(x, Tensor) else "a number read from a tensor"


def _tensor_text(told: _Told, text_of: Callable[..., str]) -> Callable[..., str]:
    def text(x: Any, *args: Any, **kwargs: Any) -> str:
        if isinstance(x, FakeTensor):  # torch's own functions call this one
            told.tell(_what(x), _outside_torch(sys._getframe(1)))
        return text_of(x, *args, **kwargs)

    return text


def _text(told: _Told, text_of: Callable[..., str]) -> Callable[..., str]:
    def text(x: Any, *spec: str) -> str:
        is_told = _is_unknown(x) and told.tell(_what(x), sys._getframe(1))
        is_formatted = any(spec) or not isinstance(x, Tensor)  # a tensor's text says its shape
        return _UNKNOWN if is_told and is_formatted else text_of(x, *spec)

    return text


def _as_json(told: _Told, default: Callable[..., Any]) -> Callable[..., Any]:
    def value(encoder: json.JSONEncoder, x: Any) -> Any:
        is_number = isinstance(x, _NUMBERS) and _is_unknown(x)
        return _UNKNOWN if is_number and told.tell(_what(x), sys._getframe(1)) else default(encoder, x)

    return value


def _number(told: _Told, unknown: Any, convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def number(x: Any) -> Any:
        try:
            return convert(x.detach() if isinstance(x, FakeTensor) else x)
        except data_dependent_errors():
            asking = _outside_stand_ins(sys._getframe(1))
            if asking is not None and _only_text_comes(asking) and told.tell(_what(x), asking):
                return unknown
            raise

    return number


def _outside_stand_ins(frame: FrameType | None) -> FrameType | None:
    """Return the frame that asks one of our stand-ins for a number or a text, which the stand-in asks for in turn."""
    while frame is not None and frame.f_code.co_filename.startswith(OURS) and frame.f_code.co_name in _ASKED:
        frame = frame.f_back
    return frame


def _outside_torch(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(library_prefixes()):
        frame = frame.f_back
    return frame


def _only_text_comes(frame: FrameType) -> bool:
    """Return whether a frame asks for a number to make text of it. Numbers ask those that they are divided by for no
    conversion, so where it comes from `%`, that formats.
    """
    return frame.f_lasti in _formatting(frame.f_code)


@functools.lru_cache(maxsize=1024)
def _formatting(code: CodeType) -> frozenset[int]:
    """Return the offsets of instructions that format, or whose result does nothing but become text."""
    places = _places_in_text(code.co_filename)
    positions = code.co_positions() if hasattr(code, "co_positions") else iter(())  # from Python 3.11 on
    by_place = {2 * i for i, place in enumerate(positions) if place in places}
    by_instruction = {
        x.offset
        for x in dis.get_instructions(code)
        if x.opname in ("BINARY_MODULO", "INPLACE_MODULO") or (x.opname == "BINARY_OP" and x.argrepr in ("%", "%="))
    }
    return frozenset(by_place | by_instruction)


def _places_in_text(file: str) -> set[tuple[int | None, ...]]:
    """Return (line, last line, column, last column) of each call in a file that is part of making text."""
    try:
        source = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return set()
    calls = (x for node in ast.walk(source) if _makes_text(node) for x in _calls_for(node))
    return {(x.lineno, x.end_lineno, x.col_offset, x.end_col_offset) for x in calls}


def _calls_for(text: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of whose results nothing but a text is made: no name and no other function gets them."""
    for part in ast.iter_child_nodes(text):
        if isinstance(part, ast.Call):
            yield part
            if not (_makes_text(part) or ast.unparse(part.func).removeprefix("math.") in _PURE):
                continue
        if not isinstance(part, ast.NamedExpr):
            yield from _calls_for(part)


def _makes_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        function = node.func
        is_method = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Constant | ast.JoinedStr)
        name = function.attr if isinstance(function, ast.Attribute) and is_method else getattr(function, "id", "")
        return name in _TEXT_OF
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return isinstance(node.left, ast.JoinedStr) or (
            isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        )
    return isinstance(node, ast.JoinedStr)


def _replacements() -> Iterator[Replacement]:
    told = _Told()
    yield (*TENSOR_TEXT, functools.partial(_tensor_text, told))
    yield json.JSONEncoder, "default", functools.partial(_as_json, told)
    for owner, name in itertools.product(_NUMBERS, ("__repr__", "__format__")):
        yield owner, name, functools.partial(_text, told)
    yield Tensor, "__format__", functools.partial(_text, told)
    for owner, name in itertools.product((Tensor, torch.SymInt, torch.SymFloat), ("__float__", "__int__")):
        if hasattr(owner, name):
            yield owner, name, functools.partial(_number, told, math.nan if name == "__float__" else 0)


# A context: inside, a user's line that makes text of a value that is not known is told once.
warned_prints = Patches(_replacements)
