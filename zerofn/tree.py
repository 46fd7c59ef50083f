"""Tree order and key paths, in one place.

ZeroFn flattens every tree here, with optree, so that leaves have the same order on every rank: dict keys are sorted,
while `torch.utils._pytree` keeps insertion order, which may differ between ranks. `None` is a node without leaves.
Dataclasses, TensorDicts and mappings that are not dicts (`UserDict`, a tokenizer's `BatchEncoding`) become nodes when
they are first seen, and so do named tuples that are more than their fields. What is rebuilt has the entries and the
attributes that it had; no code of its class runs. ZeroFn never imports tensordict, which takes longer to import than
all of ZeroFn: who has a TensorDict has imported it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import optree
import torch

from ._torch_compat import register_torch_pytree_node, torch_pytree_nodes
from .util.arguments import checked
from .util.classes import is_dataclass, made_by
from .util.constants import is_constant
from .util.kept_attributes import Constants, is_pythons, own_names, trees_and_constants
from .util.mappings import base_of, is_tensordict, tensordict_of, tensordict_parts, ways_of

NAMESPACE = "zerofn"
PyTreeSpec = optree.PyTreeSpec
Path = tuple[Any, ...]
_DEEP = 200  # levels of a tree, of which Python has a limit


def register_node(
    cls: type, flatten: Callable[[Any], tuple[Iterable[Any], Any]], unflatten: Callable[[Any, Iterable[Any]], Any]
) -> None:
    """Make `cls` a pytree node for optree and for torch.

    `flatten(x) -> (children, aux)`, `unflatten(aux, children) -> x`; `aux` is compared with `==`.
    """
    optree.register_pytree_node(
        cls, lambda x: (*_listed(*flatten(x)), None), unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE
    )
    register_torch_pytree_node(cls, lambda x: _listed(*flatten(x)), lambda children, aux: unflatten(aux, children))


def _listed(children: Iterable[Any], aux: Any) -> tuple[list[Any], Any]:
    return list(children), aux


_register: Any = optree.register_pytree_node  # its stubs know collections alone


class _Fields(NamedTuple):
    """What a dataclass node remembers besides its children."""

    names: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]


_of_fields: set[type] = set()  # dataclasses of which no other attributes are children


def register_dataclass(cls: Any, static: tuple[str, ...] = ()) -> None:
    """Make a dataclass a node of ZeroFn's trees, whose children are its fields; those named in `static` are not."""
    _of_fields.add(cls)
    _register_object(cls, static)


def _register_object(cls: Any, static: tuple[str, ...] = ()) -> None:
    """Make a node of the attributes that an object of a class has. What is rebuilt has them, too: neither `__init__`
    nor `__post_init__` nor `__new__` runs again.
    """

    def flatten(x: Any) -> tuple[list[Any], _Fields, tuple[str, ...]]:
        names = tuple([n for n in attributes_of(x) if n not in static])
        constants = (*static, *filter(is_pythons, getattr(x, "__dict__", ())))
        return [getattr(x, n) for n in names], _Fields(names, tuple((n, getattr(x, n)) for n in constants)), names

    def unflatten(fields: _Fields, children: Iterable[Any]) -> Any:
        values = dict(zip(fields.names, children, strict=True)) | dict(fields.static)
        if made_by(cls) is not object.__new__:  # a dict or a model's output as well, whose entries it makes
            return cls(**{n: values[n] for n in _fields_of(cls)[0] if n in values})
        x = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(x, name, value)  # of a frozen one, too
        return x

    _register(cls, flatten, unflatten, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE)


@functools.cache
def _fields_of(cls: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a dataclass's fields that `__init__` takes, and of the others; no names of other classes."""
    fields = dataclasses.fields(cls) if is_dataclass(cls) else ()
    return tuple(f.name for f in fields if f.init), tuple(f.name for f in fields if not f.init)


def attributes_of(x: Any) -> list[str]:
    """Return the names of the attributes of a dataclass or of another object that is a node, in one order on all ranks:
    its fields, then what else has been set on it, but for what a `functools.cached_property` can compute anew.
    """
    cls: Any = type(x)
    given, made = _fields_of(cls)
    if cls in _of_fields or made_by(cls) is not object.__new__:
        return [*given]
    more = [n for n in own_names(x) if n not in given and n not in made and not is_pythons(n)]
    return [n for n in (*given, *made, *more) if hasattr(x, n)]


def _register_container(
    cls: Any,
    entries_of: Callable[[Any], tuple[Iterable[Any], Any, tuple[Any, ...]]],
    make: Callable[[Any, list[Any]], Any],
    entries_are: str = "",
) -> None:
    """Make a node of what has entries and attributes, of which one may hold the entries.

    `entries_of(x) -> (entries, what is remembered, their names)`, `make(what is remembered, entries) -> x`.
    """

    def flatten(x: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
        entries, remembered, names = entries_of(x)
        trees, constants = trees_and_constants(x, [n for n in own_names(x) if n != entries_are], _is_tree)
        return [*entries, *trees.values()], (remembered, len(names), tuple(trees), constants), (*names, *trees)

    def unflatten(aux: tuple[Any, int, tuple[str, ...], Constants], children: Iterable[Any]) -> Any:
        remembered, num_entries, names, constants = aux
        children = list(children)
        x = make(remembered, children[:num_entries])
        for name, value in (*zip(names, children[num_entries:], strict=True), *constants.values.items()):
            object.__setattr__(x, name, value)
        return x

    _register(cls, flatten, unflatten, path_entry_type=optree.GetItemEntry, namespace=NAMESPACE)


def _register_mapping(cls: Any) -> None:
    """Make a mapping a node of its entries and attributes, or of attributes alone, one of which holds the entries."""
    if (ways := ways_of(cls)) is not None:
        _register_container(cls, *ways, "data" if issubclass(cls, UserDict) else "")
    else:
        _register_object(cls)


def _register_tensordict(cls: Any) -> None:
    _register(cls, tensordict_parts, tensordict_of, path_entry_type=optree.GetItemEntry, namespace=NAMESPACE)


def _register_namedtuple(cls: Any) -> None:
    with warnings.catch_warnings():  # optree's, that it would be a node anyway
        warnings.simplefilter("ignore", UserWarning)
        _register_container(cls, lambda x: (x, None, cls._fields), lambda _, children: tuple.__new__(cls, children))


def _register_node_of_torch(cls: Any) -> None:
    """Make a node of what is one for `torch.utils._pytree`: a user's class, a cache of transformers."""
    node = torch_pytree_nodes[cls]

    def flatten(x: Any) -> tuple[list[Any], _Context]:
        children, context = node.flatten_fn(x)
        return list(children), _Context(context)

    def unflatten(context: _Context, children: Iterable[Any]) -> Any:
        return node.unflatten_fn(list(children), context.value)

    _register(cls, flatten, unflatten, namespace=NAMESPACE)


class _Context:
    """What a node of torch's remembers besides its children: torch compares it with `==`, and it may be a list."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(_Context)


_is_node: Any = functools.partial(_register.get, namespace=NAMESPACE)
_seen: set[type] = set()


def _adopt(kinds: Iterable[type]) -> bool:
    """Make nodes of those classes of leaves that can be; return whether there were any."""
    found = False
    for cls in kinds:
        if cls in _seen or issubclass(cls, torch.Tensor) or _is_node(cls):  # as a leaf, by `is_leaf`
            continue
        if is_tensordict(cls):
            _register_tensordict(cls)
        elif is_dataclass(cls):
            _register_object(cls)
        elif issubclass(cls, Mapping):
            _register_mapping(cls)
        elif cls in torch_pytree_nodes and not issubclass(cls, tuple):  # torch.Size is a value
            _register_node_of_torch(cls)
        else:
            continue
        _seen.add(cls)
        found = True
    return found


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], PyTreeSpec]:
    """`tree` -> (leaves, treedef). Raises `TypeError` for one that holds itself."""
    try:
        leaves, treedef = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)
    except RecursionError:
        raise _endless(tree) from None
    if _adopt(set(map(type, leaves))):
        return flatten(tree, is_leaf)
    return leaves, treedef


def orders(tree: Any) -> Any:
    """Return the orders in which the dicts of a tree have their keys, which `flatten` sorts: what runs through a dict
    sees its order. None for a tree without dicts. Called before `flatten`: named tuples that are more than their fields
    become nodes of ZeroFn's when they are first seen here, since among `flatten`'s leaves they are not seen.

    >>> orders([{"b": 1, "a": (2, {"c": 3})}, 4]), orders([1, (2, 3)])
    (((('b', 'a'), (((('c',), ()),),)),), None)
    """
    try:
        return _orders(tree)
    except RecursionError:
        raise _endless(tree) from None


def _orders(tree: Any) -> Any:
    kind: Any = type(tree)
    look = _looks(kind)
    if look is None:
        return None
    keys, inside = look(tree)
    found = tuple([order for x in inside if (order := _orders(x)) is not None])
    if keys is None:
        return found or None
    return tuple([key if type(key) is str else (type(key), repr(key)) for key in keys]), found  # 1 is not True


@functools.cache
def _looks(kind: Any) -> Callable[[Any], tuple[Iterable[Any] | None, Iterable[Any]]] | None:
    """Return a function that gives the keys of a container of a class, if it has any, and what it holds. None for what
    is not a container.
    """
    base: Any = base_of(kind)
    if getattr(kind, "is_value", False):  # as a number is, though it has parts
        return None
    if kind in (dict, OrderedDict, defaultdict):
        return lambda x: (x.keys(), x.values())
    if base is not None:
        return lambda x: (base.keys(x), (*base.values(x), *_values_of(x, own_names(x))))
    if issubclass(kind, tuple | list):
        named = optree.is_namedtuple_class(kind)
        if named and (kind.__new__.__code__.co_filename != "<string>" or kind.__dictoffset__):
            _register_namedtuple(kind)
            return lambda x: (None, (*x, *_values_of(x, own_names(x))))
        return lambda x: (None, x)
    if is_dataclass(kind):
        return lambda x: (None, _values_of(x, attributes_of(x)))
    if is_tensordict(kind) or (issubclass(kind, Mapping) and made_by(kind) is not object.__new__):
        return lambda x: (x.keys(), x.values())
    return (lambda x: (None, _values_of(x, own_names(x)))) if issubclass(kind, Mapping) else None


def _is_tree(value: Any) -> bool:
    """Whether all that a value holds is tensors and constants, or what is a node or has a shape as they do."""
    todo: list[Any] = [value]
    known: dict[int, Any] = {}  # what holds itself has no end
    while todo:
        x = todo.pop()
        kind: Any = type(x)
        if id(x) in known:
            continue
        known[id(x)] = x
        if (look := _looks(kind)) is not None:
            todo += look(x)[1]
        elif not (hasattr(x, "shape") or is_constant(x) or _is_node(kind) or kind in torch_pytree_nodes):
            return False
    return True


def _values_of(x: Any, names: Iterable[str]) -> list[Any]:
    return [getattr(x, name) for name in names]


def _endless(tree: Any) -> TypeError:
    """Return the error for a tree that `flatten` finds no end of."""
    todo: list[tuple[Path, Any, tuple[int, ...]]] = [((), tree, ())]
    while todo:
        path, x, above = todo.pop()
        place = f"{name_of(path)!r}" if path else "it"
        if id(x) in above:
            return TypeError(
                f"A tree has no end: {place}, a {type(x).__name__}, contains itself. Leave that entry out."
            )
        if len(above) > _DEEP:
            return TypeError(f"A tree has more than {_DEEP} nested levels: {place[:80]}.... Make it flat.")
        with contextlib.suppress(ValueError, RecursionError):  # a leaf
            children, _, names, _ = optree.tree_flatten_one_level(x, namespace=NAMESPACE)
            todo += [((*path, name), y, (*above, id(x))) for name, y in zip(names, children, strict=True)]
    return TypeError(
        "A tree has no end: an attribute of one of its nodes is that node itself. Leave the attribute out."
    )


def unflatten(treedef: PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """The tree of `treedef` with these leaves, in `flatten`'s order."""
    return optree.tree_unflatten(treedef, leaves)


def flatten_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Path], list[Any], PyTreeSpec]:
    """`tree` -> (key paths, leaves, treedef)."""
    flatten(tree, is_leaf)  # registers new containers
    return optree.tree_flatten_with_path(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def structure(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> PyTreeSpec:
    """The treedef of `tree`."""
    return flatten(tree, is_leaf)[1]


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves of `tree`."""
    return flatten(tree, is_leaf)[0]


@checked("f")
def tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply `f` to every leaf of `tree` (and of `rest`, which must have the same structure). Return the results as such
    a tree.

    On `Sharded` trees, `f` gets this rank's shards. If `f` is elementwise, the results are the shards of `f` of the
    full tensors.

    >>> tree_map(lambda a, b: a + b, {"x": 1, "y": (2, 3)}, {"x": 10, "y": (20, 30)})
    {'x': 11, 'y': (22, 33)}
    """
    for other in (tree, *rest):
        flatten(other, is_leaf)
    return optree.tree_map(f, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)


def name_of(path: Path) -> str:
    """Return a key path as people write it: components joined with dots.

    >>> name_of(("params", "h.0.attn.weight")), name_of(("layers", 0, "w"))
    ('params.h.0.attn.weight', 'layers.0.w')
    """
    return ".".join(str(p) for p in path)


def field_names(treedef: PyTreeSpec) -> list[str]:
    """The name of every leaf of a treedef, with the fields of namedtuples by name; "" for a bare leaf.

    >>> field_names(structure({"a": [1, 2], "b": {"c.d": 3}}))
    ['a.0', 'a.1', 'b.c.d']
    """
    return [".".join(str(getattr(e, "field", e.entry)) for e in accessor) for accessor in treedef.accessors()]


def components(path: Path) -> tuple[int | str, ...]:
    """The dotted parts of a path, whole numbers as ints.

    >>> components(("h.0.attn.weight",))
    ('h', 0, 'attn', 'weight')
    """
    parts = (part for entry in path for part in (entry.split(".") if isinstance(entry, str) else (entry,)))
    return tuple(int(p) if isinstance(p, str) and p.isdecimal() else p for p in parts)


def natural_key(path: Path) -> tuple[tuple[int, int | str], ...]:
    """A sort key under which `h.2` comes before `h.10`."""
    return tuple((0, p) if isinstance(p, int) else (1, str(p)) for p in components(path))
