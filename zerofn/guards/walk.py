"""Read what a step depends on outside its arguments.

From the step on, a reading follows

- functions of the user's: their code, defaults, attributes and cells, and the globals that they name;
- modules, containers and configs, whole;
- any other object by the attributes that some line of the user's names, looked up as Python does, and by the special
  methods of its classes, which no line names; an object of a library's also one level deep, since the library's
  methods may read any of its attributes.

What functions of libraries look up, and what lies deeper in their objects, is frozen: `left` lists it.
"""

from __future__ import annotations

import abc
import builtins
import dataclasses
import inspect
import operator
import os
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..capture.changing_constants import is_generator, is_moving
from ..util.by_identity import ByIdentity
from ..util.classes import held_by, is_dataclass, named, of_class
from ..util.watched import FOLLOWED, INERT, WRITTEN
from .attributes import (
    answers,
    attributes_of,
    classes_of,
    held,
    is_config,
    names_of,
    own_attributes,
    parts_of,
    plain_attributes,
    referred,
    shown,
    shows,
    special_methods,
    told_by_value,
)
from .table import HeldObjects
from .tensors import SUMMED, contents_of
from .tokens import NOTHING, Facts, plain
from .user_code import BY_STRING, is_users, may_change, of_user, reads_of, unchecked

MANY = 1024  # entries of a list or a dict beyond which only their number counts
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = tuple(name for name in _OF_EVERY_MODULE if name.endswith("_hooks") and "state_dict" not in name)
_GIVEN = (types.MemberDescriptorType, types.GetSetDescriptorType, property)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict, types.MappingProxyType)
_CALLED = {"__call__", "_call_impl", "forward"}  # of modules, by torch
_BUILT_IN = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)

# How much of an object is read: all of it, what the user's lines name or, if a library's object has it, which it is.
ALL, NAMED, FOUND = 2, 1, 0


class Walk:
    """One reading: `facts`, and the `places` they are from. `skip`: paths left out.
    `unsure`: the paths of what was found in objects of libraries, which may not matter. `moving`: iterators and
    generators of random numbers, by path. `left`: what is not followed; `written`: what `WRITTEN` leaves out.
    """

    def __init__(self, skip: Iterable[str] = ()) -> None:
        self.facts: Facts = {}
        self.places = HeldObjects()
        self.unsure: set[str] = set()
        self.moving: dict[str, Any] = {}
        self.left: list[str] = []
        self.written: set[str] = set()
        self._skip = frozenset(skip)
        self._seen: dict[tuple[int, bool], tuple[str, Any]] = {}  # (id, found) -> (path, the value, kept alive)
        self._todo: deque[Callable[[], None]] = deque()
        self._once: set[Any] = set()  # what must not be read twice
        self._names: set[str] = set()  # attributes that any of the functions reads
        self._functions: Counter[str] = Counter()  # how many have a name
        self._open: list[tuple[Any, str, set[str]]] = []  # objects, paths, and names that may be read of them
        self._answering: list[type] = []  # classes that say themselves what is an instance
        self._of_classes: dict[type, set[str]] = {}

    def read(self, roots: Mapping[str, Any], watched: Mapping[str, Any] | None = None) -> Walk:
        """Read all that is reached from these values, and all of those that are `watched`."""
        for path, value in (watched or {}).items():
            if inspect.isroutine(value) or isinstance(value, partial):
                self.places.computed(value, value := value())
            self.visit(value, path, ALL)
        for path, value in roots.items():
            self.visit(value, path)
        num_open = -1
        while self._todo or num_open != len(self._open):
            while self._todo:
                self._todo.popleft()()
            num_open = len(self._open)
            for value, path, names in self._open[:num_open]:
                for name in sorted(self._names & names):
                    self._attribute(value, path, name)
                if self._names & BY_STRING and self._first("whole", id(value)):
                    if isinstance(value, Tensor):
                        self.places.length(own_attributes(value))
                    elif of_user(type(value)):
                        self._later(self._whole, value, path, FOUND)
        if self._answering:
            self.places.computed(abc.get_cache_token, abc.get_cache_token())
            self.facts.update(answers(self._answering, self._open))
        self.places.seal()
        return self

    def visit(self, value: Any, path: str, how: int = NAMED) -> None:
        """Note a value, and all of it that a step may depend on."""
        if path in self._skip:
            return
        token = plain(value := referred(value))
        if token is None:
            key = id(value), how == FOUND
            known = key in self._seen
            before = self._seen.setdefault(key, (path, value))
            if known and before[0] == path and path in self.facts:  # what it depends on is noted, or will be
                return
            try:
                token = ("as", before[0]) if before[0] != path else self._token(value, path, how)
            except Exception:  # it is not what its class says
                token = "object", ByIdentity(value)
                self.left.append(path)
        if how != FOUND:
            self.unsure.discard(path)
        elif path not in self.facts:
            self.unsure.add(path)
        self.facts[path] = token

    def _first(self, *key: Any) -> bool:
        known = key in self._once
        self._once.add(key)
        return not known

    def _later(self, read: Callable[..., None], *args: Any) -> None:
        self._todo.append(partial(read, *args))

    def _token(self, value: Any, path: str, how: int) -> Any:
        """Return what tells a value from others, and see to it that its parts are read."""
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return self._tensor(value, path)
        if isinstance(value, MethodType):
            self.visit(value.__self__, path)
            value = value.__func__
        if isinstance(value, FunctionType):
            self._later(self._function, value, path)
            return "function", value.__code__
        if isinstance(value, nn.Module):
            self._later(self._module, value, path, how)
            return "module", ByIdentity(type(value))
        by_value = told_by_value(value)
        if by_value is None and not isinstance(value, _CONTAINERS):
            return self._object(value, path, how)
        if of_user(type(value)):
            self._by_name(value, path, how)
        return by_value or self._container(value, path, how)

    def _tensor(self, value: Any, path: str) -> Any:
        holds = contents_of(value)
        if isinstance(value, np.generic):
            return "tensor", value.dtype, holds
        if isinstance(value, np.ndarray) and value.nbytes > SUMMED:
            self.left.append(path)
        self.places.tensor(value)
        if isinstance(value, Tensor):
            self._open.append((value, path, {"requires_grad", *own_attributes(value)}))
        return "tensor", ByIdentity(value), holds

    def _container(self, value: Any, path: str, how: int) -> Any:
        kind = "of length", len(value), type(value).__name__
        if len(value) > MANY:
            self.places.length(value)
            self.left.append(f"{path}[...]")
            return kind
        keyed, unordered = isinstance(value, dict | types.MappingProxyType), isinstance(value, set | frozenset)
        if not isinstance(value, tuple | frozenset):
            self.places.contents(value.keys() if keyed else value)
        if keyed or unordered:
            for x in value:  # which of them an object is, is seen where it is met again
                if plain(x) is None:
                    self._later(self.visit, x, f"{path}: {shown(x)}", how)
        if unordered:
            return (*kind, frozenset(plain(x) or ByIdentity(x) for x in value))
        if keyed:
            self.places.contents(value.values())
        for key, x in value.items() if keyed else enumerate(value):
            self._later(self.visit, x, f"{path}[{shown(key)}]", how)
        return (*kind, tuple(map(shown, value))) if keyed else kind

    # --- objects ----------------------------------------------------------------------------------

    def _object(self, value: Any, path: str, how: int) -> Any:
        if isinstance(value, type | ModuleType):
            self._by_name(value, path, how)
            return "object", ByIdentity(value)
        users = of_user(type(value))
        if is_moving(value) and (how != FOUND or users or is_generator(value)):
            self.moving[path] = value
            if not users and not own_attributes(value):
                return "object", ByIdentity(value)
        if how == FOUND and not (users or is_config(value) or isinstance(value, partial)):
            self.left += [path] * may_change(value)
            return "object", ByIdentity(value)
        self._by_name(value, path, how)
        if is_config(value):
            self._later(self._whole, value, path, how)
            return "config", ByIdentity(type(value))
        if how == ALL or not all(of_user(kind) or kind is object for kind in type(value).__mro__):
            self._later(self._whole, value, path, ALL if how == ALL else FOUND)
        return "object", ByIdentity(type(value) if users or isinstance(value, partial) else value)

    def _by_name(self, value: Any, path: str, how: int) -> None:
        """See to it that those attributes of an object are read whose names occur in functions."""
        kind = value if isinstance(value, type) else type(value)
        self.places.given(type, value, type(value))
        self.places.classes(classes_of(value))
        if kind is not value:
            self.places.length(own_attributes(value))  # one that is new may be asked for by functions that did without
        elif of_class(type(kind), "__instancecheck__") is not type.__instancecheck__ and not of_user(type(kind)):
            self._answering.append(kind)
        self._open.append((value, path, attributes_of(value)))
        parts = ("func", "args", "keywords") if isinstance(value, partial) else of_class(kind, "__match_args__", ())
        for name in (*special_methods(value), *parts, *(names_of(value) if how == ALL else ())):
            self._later(self._attribute, value, path, name)

    def _whole(self, value: Any, path: str, how: int) -> None:
        """All attributes of an object, or what it shows if it is written in C."""
        own = own_attributes(value)
        for name in list(own):
            self._item(own, name, f"{path}.{name}", how)
        if is_dataclass(type(value)):
            for x in dataclasses.fields(value):
                self._attribute(value, path, x.name)  # a slot, or a default
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            self._names |= {name for x in value.__reduce__()[1] for name in str(x).split(".")}
        elif not own and (get := shows(value)) is not None:
            self.places.computed(get, x := get())
            self.visit(x, f"{path}: contents")
        elif not own and not callable(value):
            self.left.append(path)

    def _item(self, holder: Any, name: str, path: str, how: int = NAMED) -> None:
        """What a dict of attributes or globals holds."""
        if name in (WRITTEN, FOLLOWED, *holder.get(WRITTEN, ())):
            self.written.add(path)
        elif path not in self._skip:
            self.places.item(holder, name, x := holder[name])
            self.visit(x, path, NAMED if name in holder.get(FOLLOWED, ()) else how)

    # --- attributes that functions read -----------------------------------------------------------

    def _attribute(self, value: Any, path: str, name: str) -> None:
        """What `value.name` may be: an attribute of its own, or of its classes."""
        full = f"{path}.{name}"
        if full in self._skip or not self._first("attribute", id(value), name):
            return
        own = own_attributes(value)
        if name in own and not isinstance(value, type):
            self._item(own, name, full)
        if name == "__dict__":
            if of_user(value if isinstance(value, type | ModuleType) else type(value)):
                return self.visit(own, full)
            for key in plain_attributes(value):
                self._item(own, key, f"{path}.{key}", FOUND)
            return
        for kind in classes_of(value):
            if name in held_by(kind):
                self._of_class(value, full, name, kind)

    def _of_class(self, value: Any, full: str, name: str, kind: type) -> None:
        found = held_by(kind)[name]
        path = f"class {named(kind)}.{name}"
        if path in self._skip:
            return
        parts = parts_of(found)
        if self._first("class", id(kind), name):
            self.places.item(held_by(kind), name, found)
            for part, x in parts.items():
                if of_user(kind):
                    self.visit(x, f"{path}{part}")
                else:
                    self.facts[f"{path}{part}"] = "object", ByIdentity(x)
        if isinstance(found, _GIVEN) and not (parts and of_user(kind)):
            if not isinstance(value, type | ModuleType):
                self._given(value, full, name)
        elif not parts and not isinstance(found, _BUILT_IN):
            self.visit(found, path)

    def _given(self, value: Any, path: str, name: str) -> None:
        """What a library's property, a slot, or an attribute in C gives, if it gives the same when asked again."""
        get = partial(getattr, value, name, NOTHING)
        try:
            x, again = get(), get()
        except Exception:  # of a property: it has no value now
            return
        if x is again is not NOTHING:
            self.places.attribute(value, name, x)
        elif x is NOTHING or plain(x) is not None:
            self.places.computed(get, x)
        else:
            return
        self.visit(x, path)

    # --- functions --------------------------------------------------------------------------------

    def _function(self, f: Any, path: str) -> None:
        if not self._first("function", id(f := unchecked(f))):
            return
        self._seen.setdefault((id(f), False), (path, f))
        k = self._functions[f.__name__] = self._functions[f.__name__] + 1
        name = f.__name__ if k == 1 else f"{f.__name__} ({k})"
        self.places.function(f)
        users = is_users(f.__code__.co_filename)
        if users:
            self.visit(f.__defaults__, f"{name}: defaults")
            self.visit(f.__kwdefaults__, f"{name}: keyword defaults")
        self.places.length(f.__dict__)
        for attribute in list(f.__dict__):
            self._item(f.__dict__, attribute, f"{path}.{attribute}")
        for cell_name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            if f"{name}: {cell_name}" not in self._skip:
                self.places.given(held, cell, x := held(cell))
                if cell_name == "__class__":  # of `super()`, which makes no instance
                    self._open.append((x, f"{name}: {cell_name}", attributes_of(x)))
                else:
                    self.visit(x, f"{name}: {cell_name}", NAMED if users else FOUND)
        if users:
            self._code(f)

    def _code(self, f: FunctionType) -> None:
        found = reads_of(f.__code__)
        self._names |= found.attributes | (found.globals & BY_STRING)
        for name in sorted(found.globals):
            self._global(f.__globals__, name)
        for name in sorted(found.modules):
            for module in (name, f"{f.__globals__.get('__package__')}.{name}"):
                if module in sys.modules:
                    self.visit(sys.modules[module], f"module {module}")
                else:
                    self.places.absent(sys.modules, module)
        if "getenv" in found.attributes | found.globals:
            self.visit(os.environ, "os.environ")

    def _global(self, space: dict[str, Any], name: str) -> None:
        home = space.get("__name__", "__main__")
        path = f"global {name}" if home == "__main__" else f"global {home}.{name}"
        if path in self._skip or not self._first("global", id(space), name):
            return
        for holder in (space, vars(builtins)):
            if name in holder:
                return self._item(holder, name, path)
            self.places.absent(holder, name)
        self.facts[path] = NOTHING

    # --- modules ----------------------------------------------------------------------------------

    def _module(self, module: nn.Module, path: str, how: int) -> None:
        attributes = module.__dict__
        if not self._first("module", id(module)) or not isinstance(attributes.get("_modules"), dict):
            return  # read, or compiled by TorchScript
        self.places.module(module)
        for name in list(attributes):
            if name not in _OF_EVERY_MODULE:
                self._item(attributes, name, f"{path}.{name}", how)
        for kind in ("_parameters", "_buffers"):
            for name, x in attributes[kind].items():
                if f"{path}.{name}" not in self._skip:
                    self.facts[f"{path}.{name}"] = ("tensor", ByIdentity(x))
                    if isinstance(x, Tensor):
                        self._open.append((x, f"{path}.{name}", {"requires_grad", *own_attributes(x)}))
        for name, child in attributes["_modules"].items():
            self.visit(child, f"{path}.{name}", how)
        for hooks in _HOOKS:
            if any(not getattr(x, INERT, False) for x in (attributes.get(hooks) or {}).values()):
                self.visit(attributes[hooks], f"{path}.{hooks}")
        self._class(module, path, how)

    def _class(self, module: nn.Module, path: str, how: int) -> None:
        """What a module's classes hold: what torch calls, and of the user's classes what functions name."""
        kind = type(module)
        if kind not in self._of_classes:
            self._of_classes[kind] = {name for x in classes_of(module) for name in held_by(x)}
            self.places.classes(classes_of(module))
            for name in _CALLED:
                self._attribute(module, path, name)
        self._open.append((module, path, self._of_classes[kind]))
        for name in (*special_methods(module), *(names_of(module) if how == ALL else ())):
            self._later(self._attribute, module, path, name)
