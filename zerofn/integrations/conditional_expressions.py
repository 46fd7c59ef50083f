"""Conditional expressions on values that are known later: `x.item() if n > 0 else 0.0` in a method of a host's.

Python asks a condition for its truth at once. A method is compiled again with each conditional expression as a call,
`choose(n > 0, lambda: x.item(), lambda: 0.0)`, and `float(x)` as `called(float, x)`, which may wait.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

from .recording_containers import CHANGES

_NUMBERS = {"float", "int", "round", "abs", "max", "min", "sum"}
_MODULES = {"math", "np", "numpy", "statistics"}
_OF_FRAMES = {"super", "locals", "vars", "dir", "eval", "exec"}  # ask the function that they stand in
_OWN_SCOPE = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)  # mean something else in a lambda


class _Calls(ast.NodeTransformer):
    """Writes calls in place of conditional expressions and of functions of numbers."""

    def __init__(self) -> None:
        self.found = False

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """A conditional expression."""
        self.generic_visit(node)
        if any(isinstance(x, _OWN_SCOPE) or getattr(x, "id", "") in _OF_FRAMES for x in ast.walk(node)):
            return node
        return self._call("choose", [node.test, _later(node.body), _later(node.orelse)], [], node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call."""
        self.generic_visit(node)
        f = node.func
        by_name = isinstance(f, ast.Name) and f.id in _NUMBERS
        of_module = isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id in _MODULES
        if not (by_name or of_module) or not node.args:
            return node
        return self._call("called", [f, *node.args], node.keywords, node)

    def _call(self, name: str, args: list[ast.expr], keywords: list[ast.keyword], at: ast.AST) -> ast.AST:
        self.found = True
        call = ast.Call(ast.Name(f"_zerofn_{name}", ast.Load()), args, keywords)
        return ast.fix_missing_locations(ast.copy_location(call, at))


def _later(x: ast.expr) -> ast.expr:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), x)


def rewritten(function: Any, choose: Callable[..., Any], called: Callable[..., Any]) -> FunctionType | None:
    """Return a method with its conditional expressions as calls of `choose(test, first, second)`, and functions of
    numbers as calls of `called(function, *args)`; None if it has none, or no source.
    """
    if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, SyntaxError, TypeError):
        return None
    if not isinstance(definition, ast.FunctionDef) or _is_mangled(definition):
        return None
    calls = _Calls()
    definition.body = [calls.visit(x) for x in definition.body]
    if not calls.found:
        return None
    definition.decorator_list = []
    helpers = {"_zerofn_choose": choose, "_zerofn_called": called}
    code = _inner(definition, first, function, [*function.__code__.co_freevars, *helpers])
    own = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells = {**own, **{name: CellType(x) for name, x in helpers.items()}}
    closure = tuple(cells[name] for name in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    return made


def _is_mangled(definition: ast.AST) -> bool:
    """Whether a name is of a class alone, such as `self.__x`."""
    names = (getattr(x, "attr", getattr(x, "id", "")) for x in ast.walk(definition))
    return any(x.startswith("__") and not x.endswith("__") for x in names)


def _inner(definition: ast.FunctionDef, first: int, function: FunctionType, free: Sequence[str]) -> CodeType:
    """Return the code of a function that is defined where some names are free."""
    names = ast.arguments([], [ast.arg(x) for x in free], None, [], [], None, [])
    outer = ast.parse("def outer(): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.args, outer.body = names, [definition]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    ast.increment_lineno(module, first - 1)
    code = compile(module, function.__code__.co_filename, "exec")
    (outside,) = (x for x in code.co_consts if isinstance(x, CodeType))
    return next(x for x in outside.co_consts if isinstance(x, CodeType) and x.co_name == definition.name)


def reached(
    kinds: Sequence[type], starts: Iterable[str], without: Iterable[str] = ()
) -> Iterator[tuple[type, str, FunctionType]]:
    """Yield (class, name, method) of some methods, and those that they name, in some classes."""
    todo, seen = list(starts), set(without)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for kind in kinds:
            found = vars(kind).get(name)
            if isinstance(found, FunctionType):
                yield kind, name, found
                todo += names_in(found.__code__)


def functions_of(found: Any) -> Iterator[FunctionType]:
    """Yield the functions that an attribute runs: of a method, a property, a partial, or what wraps one."""
    for part in (found, *(getattr(found, name, None) for name in ("fget", "fset", "__func__", "func", "__wrapped__"))):
        if isinstance(part, FunctionType):
            yield part


def named_by_users(host: Any, starts: Iterable[str], is_users: Callable[[str], bool]) -> set[str]:
    """Return the names of attributes and globals in the user's functions that methods of a host may run: methods and
    properties that are named, of the host and of the user's objects that it has, special methods of those, and
    functions that a function of the user's has in its globals or its closure. `is_users`: whether a Python module, by
    name, is the user's.
    """
    hosts = type(host).__mro__
    kinds, names, named = dict.fromkeys(hosts), set(starts), set[str]()
    functions: dict[FunctionType, None] = {}

    def meet(x: Any) -> None:
        kinds.update((k, None) for k in (x if isinstance(x, type) else type(x)).__mro__ if is_users(k.__module__))

    for x in list(vars(host).values()):
        meet(x)
    before, run = (0, 0, 0), 0
    while before != (before := (len(kinds), len(names), len(functions))):
        for space in (vars(host), *map(vars, kinds)):
            functions.update((f, None) for name in names & space.keys() for f in functions_of(space[name]))
        for kind in kinds.keys() - set(hosts):  # a step may make one of these, call it, or compare it
            functions.update((f, None) for name, x in vars(kind).items() if name[:2] == "__" for f in functions_of(x))
        for f in list(functions)[run:]:
            found = {*names_in(f.__code__), *(_texts(f.__code__) if "getattr" in f.__code__.co_names else ())}
            names |= found
            if is_users(f.__module__):
                named |= found
                for x in (*map(f.__globals__.get, found), *map(_held, f.__closure__ or ())):
                    meet(x)
                    functions.update((g, None) for g in functions_of(x) if is_users(g.__module__))
            run += 1
    return named


def _texts(code: CodeType) -> Iterator[str]:
    return (x for x in code.co_consts if isinstance(x, str))


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


@functools.lru_cache(2**14)
def stored_by(code: CodeType) -> frozenset[str]:
    """Return the names of attributes that code assigns."""
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in stored_by(x)]
    own = (str(x.argval) for x in dis.get_instructions(code) if x.opname in ("STORE_ATTR", "DELETE_ATTR"))
    return frozenset({*inner, *own})


def may_change(code: CodeType) -> bool:
    """Whether code assigns attributes or entries, or calls what changes containers."""
    return any(x.opname in ("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR") for x in dis.get_instructions(code)) or bool(
        CHANGES & set(names_in(code))
    )


def names_in(code: CodeType) -> list[str]:
    """Return the names of attributes and globals that code reads or writes."""
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in names_in(x)]
    return [*code.co_names, *inner]


def replaced(methods: Mapping[tuple[type, str], Any]) -> Callable[[], None]:
    """Put methods into their classes. Returns what puts back those that were there."""
    before = {key: vars(key[0])[key[1]] for key in methods}
    for (kind, name), method in methods.items():
        setattr(kind, name, method)

    def back() -> None:
        for (kind, name), method in before.items():
            setattr(kind, name, method)

    return back
