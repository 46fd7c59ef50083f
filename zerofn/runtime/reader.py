"""Read what a step depends on outside its arguments: from its functions to their globals, cells, modules and configs.

Only the user's own functions are read: what a library's function looks up is the library's affair. What a library's
function was given to keep (a wrapped function, a schedule, a module) is read.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..sharding.sharded import is_sharded
from .contents import contents_of
from .facts import NOTHING, Facts, Same, plain
from .kinds import attributes_of, held, is_config, is_followed, own_attributes, shown, special_methods, told_by_value
from .places import Places
from .user_code import is_users, of_user, reads_of

MANY = 1024  # entries of a list or a dict beyond which only their number counts
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = tuple(name for name in _OF_EVERY_MODULE if name.endswith("_hooks") and "state_dict" not in name)


class Reader:
    """One reading: `facts`, the `places` they are from, and `modules` by path. `skip`: paths left out."""

    def __init__(self, skip: Iterable[str] = ()) -> None:
        self.facts: Facts = {}
        self.places = Places()
        self.modules: dict[str, nn.Module] = {}
        self._skip = frozenset(skip)
        self._seen: dict[int, tuple[str, Any]] = {}  # id -> (path, the value, kept alive so that ids stay unique)
        self._todo: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._read: set[Any] = set()  # what must not be read twice
        self._names: set[str] = set()  # attributes that any of the functions reads
        self._functions: dict[str, list[FunctionType]] = {}  # by name
        self._open: list[tuple[Any, str]] = []  # objects of which any attribute may be read

    def read(self, roots: Mapping[str, Any]) -> Reader:
        """Read all that is reached from these values."""
        for path, value in roots.items():
            self.visit(value, path)
        while self._todo:
            while self._todo:
                read, args = self._todo.popleft()
                read(*args)
            for value, path in list(self._open):
                for name in sorted(self._names & attributes_of(value)):
                    if self._first(("named", id(value), name)):
                        self._chain(value, path, (name,))
        self.places.seal()
        return self

    def visit(self, value: Any, path: str) -> None:
        """Note a value, and all of it that a step may depend on."""
        if path in self._skip:
            return
        token = plain(value)
        if token is None:
            known = id(value) in self._seen
            before = self._seen.setdefault(id(value), (path, value))
            if known and before[0] == path and path in self.facts:  # what it depends on is noted, or will be
                return
            token = ("as", before[0]) if before[0] != path else self._token(value, path)
        self.facts[path] = token

    def _first(self, key: Any) -> bool:
        known = key in self._read
        self._read.add(key)
        return not known

    def _later(self, read: Callable[..., None], *args: Any) -> None:
        self._todo.append((read, args))

    def _token(self, value: Any, path: str) -> Any:
        """Return what tells a value from others, and see to it that its parts are read."""
        if isinstance(value, Tensor | np.ndarray | np.generic):
            if not isinstance(value, np.generic):
                self.places.tensor(value)
            return (
                "tensor",
                Same(value) if isinstance(value, Tensor | np.ndarray) else value.dtype,
                contents_of(value),
            )
        if isinstance(value, FunctionType):
            self._later(self._function, value, path)
            return "function", value.__code__
        if isinstance(value, MethodType):
            self._later(self._function, value.__func__, path, value.__self__)
            return "method", getattr(value.__func__, "__code__", None)
        if isinstance(value, functools.partial):
            self._later(self._partial, value, path)
            return "partial", len(value.args)
        if isinstance(value, nn.Module):
            self._later(self._module, value, path)
            return "module", Same(type(value))
        if isinstance(value, list | tuple | set | frozenset | deque | dict):
            if of_user(type(value)):
                self._by_name(value, path)
            return self._container(value, path)
        return self._object(value, path)

    def _object(self, value: Any, path: str) -> Any:
        by_value = told_by_value(value)
        if is_config(value) and not isinstance(value, Mapping):
            self._later(self._fields, value, path)
            return by_value or ("config", Same(type(value)))
        if isinstance(value, type | ModuleType):
            if of_user(value):
                self._by_name(value, path)
            return "object", Same(value)
        if of_user(type(value)):
            self._by_name(value, path)
            return by_value or ("object", Same(type(value)))
        if isinstance(value, Mapping) and not is_sharded(value):
            for key, x in value.items():
                self.visit(x, f"{path}[{shown(key)}]")
            self.places.mapping(value)
            return "of length", len(value), type(value).__name__
        if callable(wrapped := own_attributes(value).get("__wrapped__")):
            self.visit(wrapped, f"{path}.__wrapped__")
        return "object", Same(value)

    def _by_name(self, value: Any, path: str) -> None:
        """See to it that those attributes of an object of the user's are read whose names occur in functions.

        And its special methods, which no name tells of: `x[0]`, `2 * x`, `with x`, and `x()` for what a class makes.
        """
        self._open.append((value, path))
        self._number(value)
        for name in special_methods(value):
            self._later(self._chain, value, path, (name,))

    def _number(self, value: Any) -> None:
        """How many attributes an object has: one that is new may be asked for by functions that did without."""
        if not isinstance(value, type | ModuleType):
            self.places.length(own_attributes(value))

    def _container(self, value: Any, path: str) -> Any:
        mutable = not isinstance(value, tuple | frozenset)
        kind = "of length", len(value), type(value).__name__
        if len(value) > MANY:
            self.places.length(value)
            return kind
        if isinstance(value, dict):
            for key, x in value.items():
                self.visit(x, f"{path}[{shown(key)}]")
            self._members(value, path)
            self.places.contents(value.values())
            self.places.contents(value.keys())
            return kind
        if mutable:
            self.places.contents(value)
        if isinstance(value, set | frozenset):
            self._members(value, path)
            return (*kind, frozenset(plain(x) or Same(x) for x in value))
        for k, x in enumerate(value):
            self.visit(x, f"{path}[{k}]")
        return kind

    def _members(self, value: Any, path: str) -> None:
        """Keys, and elements of sets: which of them an object is, is seen where it is met again."""
        for x in value:
            if plain(x) is None:
                self.visit(x, f"{path}: {shown(x)}")

    def _partial(self, value: Any, path: str) -> None:
        self.visit(value.func, f"{path}.func")
        for k, x in enumerate(value.args):
            self.visit(x, f"{path}.args[{k}]")
        self.visit(value.keywords, f"{path}.keywords")

    def _fields(self, value: Any, path: str) -> None:
        """All fields of a config."""
        self._number(value)
        attributes = own_attributes(value)
        names = [x.name for x in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        for name in dict.fromkeys([*attributes, *names]):
            if f"{path}.{name}" in self._skip:
                continue
            if name in attributes:
                x = attributes[name]
                self.places.item(attributes, name, x)
            elif hasattr(value, name):
                x = getattr(value, name)
                self.places.attribute(value, name, x)
            else:
                continue
            self.visit(x, f"{path}.{name}")
        if of_user(type(value)):
            self._open.append((value, path))  # for its methods

    # --- functions --------------------------------------------------------------------------------

    def _function(self, f: Any, path: str, owner: Any = None) -> None:
        if not isinstance(f, FunctionType):
            return
        kind = type(owner) if isinstance(owner, nn.Module) else id(owner)  # modules' own attributes are read anyway
        if not self._first((id(f), kind)):
            return
        self._seen.setdefault(id(f), (path, f))
        name = self._name_of(f)
        self.places.function(f)
        for k, x in enumerate(f.__defaults__ or ()):
            self.visit(x, f"{name}: default {k}")
        if f.__kwdefaults__:
            self.visit(f.__kwdefaults__, f"{name}: keyword defaults")
        if callable(wrapped := f.__dict__.get("__wrapped__")):
            self.visit(wrapped, f"{path}.__wrapped__")
        if is_users(f.__code__.co_filename):
            self._code(f.__code__, f, path, owner)
        else:
            for cell_name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
                x = held(cell)
                if callable(x) or dataclasses.is_dataclass(x) or isinstance(x, tuple):
                    self.places.cell(cell, x)
                    self.visit(x, f"{name}: {cell_name}")

    def _name_of(self, f: FunctionType) -> str:
        """A function's name, with a number if another one has it."""
        same = self._functions.setdefault(f.__name__, [])
        if not any(x is f for x in same):
            same.append(f)
        k = next(k for k, x in enumerate(same) if x is f)
        return f"{f.__name__} ({k + 1})" if k else f.__name__

    def _code(self, code: CodeType, f: FunctionType, path: str, owner: Any) -> None:
        found = reads_of(code)
        self._names |= found.names
        if found.asks_super and owner is not None:
            self._supers(owner, found.names)
        own_name = f.__code__.co_varnames[:1]
        cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
        for read in found.reads:
            if read.kind == "global":
                self._global(f, read)
            elif read.kind == "module":
                for name in (read.name, f"{f.__globals__.get('__package__')}.{read.name}"):
                    if name in sys.modules:
                        self._root(sys.modules[name], f"module {name}", read)
            elif read.kind == "free" and read.name in cells:
                x = held(cells[read.name])
                if x is not NOTHING and f"{self._name_of(f)}: {read.name}" not in self._skip:
                    self.places.cell(cells[read.name], x)
                    self._root(x, f"{self._name_of(f)}: {read.name}", read)
            elif owner is not None and (read.name,) == own_name:
                self._root(owner, path.rpartition(".")[0] or path, read)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self._code(inner, f, path, owner)

    def _global(self, f: FunctionType, read: Any) -> None:
        space, name = f.__globals__, read.name
        home = space.get("__name__", "__main__")
        path = f"global {name}" if home == "__main__" else f"global {home}.{name}"
        if path in self._skip:
            return
        if name not in space:
            if self._first((id(space), name)):
                self.places.absent(space, name)
                self.facts[path] = NOTHING
            return
        x = space[name]
        if self._first((id(space), name)):
            self.places.item(space, name, x)
        self._root(x, path, read)

    def _root(self, value: Any, path: str, read: Any) -> None:
        if read.stays:
            return
        if read.attributes:
            self._chain(value, path, read.attributes)
        else:
            self.visit(value, path)

    # --- attributes that functions read -----------------------------------------------------------

    def _chain(self, value: Any, path: str, names: tuple[str, ...]) -> None:
        """Read `value.names[0].names[1]`... as far as attributes can be followed, and note the last value whole."""
        while names:
            if path in self._skip:
                return
            if isinstance(value, nn.Module | list | dict | tuple) or told_by_value(value):
                self.visit(value, path)
            if not is_followed(value):
                break
            self.facts.setdefault(
                path, ("object", Same(value if isinstance(value, type | ModuleType) else type(value)))
            )
            found = self._attribute(value, names[0], path)
            if found is None:  # so it may be the affair of `__getattr__`
                if not isinstance(value, nn.Module) and of_user(type(value)):
                    self.visit(value, path)
                return
            value, path, names = found, f"{path}.{names[0]}", names[1:]
        if not isinstance(value, _Done):
            self.visit(value, path)

    def _attribute(self, value: Any, name: str, path: str) -> Any:
        """Return an attribute's value; `_Done` for a method, which is read later, None for one that is not there."""
        if f"{path}.{name}" in self._skip:
            return None
        own = own_attributes(value)
        if name == "__dict__" and own and not isinstance(value, type):
            return own
        if isinstance(value, nn.Module) and name not in own:
            if any(name in own.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules")):
                return _Done() if name not in own["_modules"] else own["_modules"][name]
        if name in own and not isinstance(value, type):
            self.places.item(own, name, own[name])
            return own[name]
        for kind in (value if isinstance(value, type) else type(value)).__mro__:
            if name not in kind.__dict__:
                continue
            found = kind.__dict__[name]
            if isinstance(found, types.MemberDescriptorType) and not isinstance(value, type):
                if hasattr(value, name):
                    self.places.attribute(value, name, getattr(value, name))
                    return getattr(value, name)
                return None
            if not of_user(kind):
                return None
            return self._of_class(value, kind, name, found, path)
        return None

    def _of_class(self, value: Any, kind: type, name: str, found: Any, path: str) -> Any:
        self.places.item(kind.__dict__, name, found)
        if not isinstance(value, type):
            self.places.absent(own_attributes(value), name)
        if isinstance(found, staticmethod):
            return found.__func__
        inner = found.__func__ if isinstance(found, classmethod) else None
        inner = found.fget if isinstance(found, property) else getattr(found, "func", inner) or inner
        if inner is None and inspect.isfunction(found):
            inner = found
        if inner is None:
            return found
        owner = kind if isinstance(found, classmethod) else value
        self.facts[f"{path}.{name}"] = ("function", getattr(inner, "__code__", None))
        self._later(self._function, inner, f"{path}.{name}", owner)
        return _Done()

    def _supers(self, owner: Any, names: Iterable[str]) -> None:
        """The methods of these names that `super()` may find."""
        for kind in (owner if isinstance(owner, type) else type(owner)).__mro__:
            for name in sorted(names):
                if name in kind.__dict__ and of_user(kind):
                    self._of_class(owner, kind, name, kind.__dict__[name], f"class {kind.__qualname__}")

    # --- modules ----------------------------------------------------------------------------------

    def _module(self, module: nn.Module, path: str) -> None:
        attributes = module.__dict__
        if not isinstance(attributes.get("_modules"), dict):  # compiled by TorchScript
            return
        self.modules[path] = module
        self.places.module(module)
        for name, x in attributes.items():
            if name not in _OF_EVERY_MODULE and f"{path}.{name}" not in self._skip:
                self.places.item(attributes, name, x)
                self.visit(x, f"{path}.{name}")
        for kind in ("_parameters", "_buffers"):
            for name, x in attributes[kind].items():
                if f"{path}.{name}" not in self._skip:
                    self.facts[f"{path}.{name}"] = ("tensor", Same(x))
        for name, child in attributes["_modules"].items():
            self.visit(child, f"{path}.{name}")
        for hooks in _HOOKS:
            if attributes.get(hooks):
                self.visit(attributes[hooks], f"{path}.{hooks}")
        self._class(module, path)

    def _class(self, module: nn.Module, path_of_module: str) -> None:
        """A module class's `forward`, by which functions it calls if it is the user's, and special methods."""
        for kind in type(module).__mro__:
            forward = kind.__dict__.get("forward")
            if forward is not None:
                if self._first(("forward", kind)):
                    path = f"class {kind.__qualname__}.forward"
                    self.facts[path] = ("function", getattr(forward, "__code__", None))
                    self.places.item(kind.__dict__, "forward", forward)
                    if of_user(kind):
                        self._later(self._function, forward, path, module)
                break
        for name in special_methods(module):
            self._later(self._chain, module, path_of_module, (name,))


class _Done:
    """In place of a value that needs no more reading."""
