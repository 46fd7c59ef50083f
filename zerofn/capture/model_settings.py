"""Which setting of a model leads to a line: what a model does in training only, and only if it is asked to.

Libraries' models have layers that are skipped at random, and masks that NumPy draws, which a captured step cannot
have. Both can be switched off, and the source says by what: `if self.training and self.config.mask_time_prob > 0:`
around the line, or a return before it. A switch is a part of such a condition that consists of one setting of the
module, and that comes out otherwise when the setting is 0 or False (or True), or, where it is None, its default.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import warnings
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import nn

_EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
Condition = tuple[ast.expr, bool]  # what is asked, and the answer with which the line is reached


class _Switch(NamedTuple):
    name: str  # "config.layerdrop"
    value: Any  # what it is
    off: Any  # with what the line is not reached


def settings_behind(rows: Iterable[tuple[FrameType, int]]) -> str:
    """Return ' <a sentence>' that names the settings which lead to a line, or ''. `rows`: frames, innermost first, and
    the line that each is at.
    """
    for frame, line in rows:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and (found := _switches(module, frame.f_code, line)):
            are = " and ".join(f"{x.name}={x.value!r}" for x in found)
            off = " or ".join(f"{x.name.rpartition('.')[2]}={x.off!r}" for x in found)
            return f" {type(module).__name__} does so because of {are}: build the model with {off}."
    return ""


def _switches(module: nn.Module, code: CodeType, line: int) -> list[_Switch]:
    function = _function(code)
    if function is None:
        return []
    conditions = list(_leading_to(function, line))
    if not any(_asks_for_training(test) for test, _ in conditions):
        return []
    found = (_switch(module, part, answer) for test, answer in conditions for part in _parts(test, answer))
    switches = list(dict.fromkeys(x for x in found if x is not None))
    return [x for x in switches if x.value is None] or switches  # None is no default: it was asked for


@functools.lru_cache(maxsize=256)
def _function(code: CodeType) -> ast.FunctionDef | None:
    """Return the source of a function; None without one."""
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse("".join(linecache.getlines(code.co_filename)))):
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                if code.co_firstlineno in (node.lineno, *(x.lineno for x in node.decorator_list)):
                    return node
    return None


def _leading_to(function: ast.FunctionDef, line: int) -> Iterator[Condition]:
    """Yield the conditions with which a line is reached, and those with which names that it uses got their values."""
    yield from _around(function.body, line)
    used = {
        x.id for node in ast.walk(function) if _is_at(node, line) for x in ast.walk(node) if isinstance(x, ast.Name)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and node.lineno < line and any(_id(x) in used for x in node.targets):
            yield from _around(function.body, node.lineno)


def _around(body: list[ast.stmt], line: int) -> Iterator[Condition]:
    for statement in body:
        if not statement.lineno <= line <= (statement.end_lineno or line):
            if isinstance(statement, ast.If) and statement.lineno < line and isinstance(statement.body[-1], _EXITS):
                yield statement.test, False
            continue
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, [])
            if inner and inner[0].lineno <= line <= (inner[-1].end_lineno or line):
                if isinstance(statement, ast.If):
                    yield statement.test, name == "body"
                yield from _around(inner, line)


def _is_at(node: ast.AST, line: int) -> bool:
    """Whether an expression is on a line."""
    return isinstance(node, ast.expr) and node.lineno <= line <= (node.end_lineno or line)


def _id(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _asks_for_training(test: ast.expr) -> bool:
    return any(isinstance(x, ast.Attribute) and x.attr == "training" for x in ast.walk(test))


def _parts(test: ast.expr, answer: bool) -> list[ast.expr]:
    """Return the parts of a condition each of which has the answer, if the condition has it."""
    is_all = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if answer else ast.Or)
    return test.values if is_all and isinstance(test, ast.BoolOp) else [test]


def _switch(module: nn.Module, part: ast.expr, answer: bool) -> _Switch | None:
    """Return the setting that a condition consists of, if it has another answer when the setting is off."""
    settings = list(_settings(part))
    if len(settings) != 1:
        return None
    (setting,) = settings
    value, name = _value(setting, module), _name(setting, module)
    if value is None:
        given = inspect.signature(type(module)).parameters.get(name.rpartition(".")[2])
        off = None if given is None or given.default is given.empty else given.default
    elif type(value) in (bool, int, float):
        off = not value if isinstance(value, bool) else type(value)(0)
    else:
        return None
    if off is None:
        return None
    replaced = _Replaced(setting, off).visit(ast.parse(ast.unparse(part), mode="eval").body)
    now = _value(replaced, module)
    return None if now is None or bool(now) is answer else _Switch(name, value, off)


def _settings(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what is read of the module: `self.p`, `self.config.p`, `getattr(self.config, "p", 0)`."""
    if isinstance(node, ast.Attribute) and _root(node) == "self":
        if node.attr != "training":
            yield node
    elif isinstance(node, ast.Call) and _id(node.func) == "getattr" and _root(node.args[0]) == "self":
        yield node
    else:
        for x in ast.iter_child_nodes(node):
            yield from _settings(x)


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return _id(node)


def _value(node: ast.expr, module: nn.Module) -> Any:
    """Return the value of a condition or a setting; None if more than the module is needed for it."""
    names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    if names <= {"self", "getattr"}:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a value in a setting's place may read "0.1 is None"
            text = ast.fix_missing_locations(ast.Expression(node))
            return eval(compile(text, "<condition>", "eval"), {"getattr": getattr}, {"self": module})
    return None


class _Replaced(ast.NodeTransformer):
    """Puts a value in a setting's place."""

    def __init__(self, setting: ast.expr, value: Any) -> None:
        self._text, self._value = ast.unparse(setting), value

    def visit(self, node: ast.AST) -> Any:
        is_setting = isinstance(node, ast.expr) and ast.unparse(node) == self._text
        return ast.Constant(self._value) if is_setting else self.generic_visit(node)


def _name(setting: ast.expr, module: nn.Module) -> str:
    """Return a setting's name in the configuration that the module was built with, if its `__init__` says so."""
    text = _plain(setting).removeprefix("self.")
    if "." in text:
        return text
    codes = (getattr(inspect.unwrap(vars(x).get("__init__", int)), "__code__", None) for x in type(module).__mro__)
    for init in filter(None, (_function(code) for code in codes if code is not None)):
        for node in ast.walk(init):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{text}":
                source = _plain(node.value)
                return source if source.startswith("config.") else f"{type(module).__name__}.{text}"
    return f"{type(module).__name__}.{text}"


def _plain(node: ast.expr) -> str:
    """`getattr(a, "b", c)` as `a.b`."""
    if isinstance(node, ast.Call) and _id(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
        return f"{ast.unparse(node.args[0])}.{node.args[1].value!s}"
    return ast.unparse(node)
