"""Tree order and key paths, in one place.

ZeroFn flattens every tree here, with optree, so that leaves have the same order on every rank: dict keys are sorted,
while `torch.utils._pytree` keeps insertion order, which may differ between ranks. `None` is a node without leaves.
Dataclasses, TensorDicts and mappings that are no dicts (`UserDict`, a tokenizer's `BatchEncoding`) become nodes when
they are first seen. ZeroFn never imports tensordict, which takes longer
to import than all of ZeroFn: who has a TensorDict has imported it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import optree
import torch

from ._torch_compat import register_torch_pytree_node, torch_pytree_nodes
from .util.arguments import checked
from .util.constants import constant_attributes

NAMESPACE = "zerofn"
PyTreeSpec = optree.PyTreeSpec
Path = tuple[Any, ...]


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
    _register_dataclass(cls, static)


def _register_dataclass(cls: Any, static: tuple[str, ...] = ()) -> None:
    """Make a dataclass a node. What is rebuilt has the attributes that it had: neither `__init__` nor `__post_init__`
    runs again.
    """

    def flatten(x: Any) -> tuple[list[Any], _Fields, tuple[str, ...]]:
        names = tuple([n for n in attributes_of(x) if n not in static])
        return [getattr(x, n) for n in names], _Fields(names, tuple((n, getattr(x, n)) for n in static)), names

    def unflatten(fields: _Fields, children: Iterable[Any]) -> Any:
        values = dict(zip(fields.names, children, strict=True)) | dict(fields.static)
        if cls.__new__ is not object.__new__:  # a dict or a model's output as well, whose entries it makes
            return cls(**{n: values[n] for n in _fields_of(cls)[0] if n in values})
        x = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(x, name, value)  # of a frozen one, too
        return x

    _register(cls, flatten, unflatten, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE)


@functools.cache
def _fields_of(cls: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a dataclass's fields that `__init__` takes, and of the others."""
    fields = dataclasses.fields(cls)
    return tuple(f.name for f in fields if f.init), tuple(f.name for f in fields if not f.init)


def attributes_of(x: Any) -> list[str]:
    """Return the names of a dataclass's attributes, in one order on all ranks: its fields, then what else has been set
    on it, but for what a `functools.cached_property` can compute anew.
    """
    cls: Any = type(x)
    given, made = _fields_of(cls)
    if cls in _of_fields or cls.__new__ is not object.__new__:
        return [*given]
    more = [n for n in getattr(x, "__dict__", ()) if n not in given and n not in made]
    more = sorted(n for n in more if not isinstance(getattr(cls, n, None), functools.cached_property))
    return [n for n in (*given, *made, *more) if hasattr(x, n)]


def _is_tensordict(cls: type) -> bool:
    """Return whether a class is TensorDict's, without importing tensordict."""
    base = getattr(sys.modules.get("tensordict"), "TensorDictBase", None)  # None while it is being imported
    return base is not None and issubclass(cls, base)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """The keys of a mapping, of which those of equal ones may be `given` in another order, as with dicts."""

    sorted: tuple[Any, ...]
    given: tuple[Any, ...] = dataclasses.field(compare=False)

    def in_order(self, children: Iterable[Any]) -> dict[Any, Any]:
        """The mapping's entries as they were given."""
        items = dict(zip(self.sorted, children, strict=True))
        return {k: items[k] for k in self.given}


def _register_tensordict(cls: Any) -> None:
    def flatten(x: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
        keys = _Keys(tuple(sorted(x.keys())), tuple(x.keys()))
        return [x.get(k) for k in keys.sorted], (keys, tuple(x.batch_size)), keys.sorted

    _register(cls, flatten, _tensordict, path_entry_type=optree.GetItemEntry, namespace=NAMESPACE)


def _tensordict(aux: tuple[_Keys, tuple[int, ...]], children: Iterable[Any]) -> Any:
    """Rebuild a TensorDict, or a plain dict if a child is neither tensor nor TensorDict (such as a `Sharded`).

    Leaves may have been cut or stacked: the batch size becomes their common leading shape.
    """
    keys, batch_size = aux
    items = keys.in_order(children)
    if not all(isinstance(v, torch.Tensor) or _is_tensordict(type(v)) for v in items.values()):
        return items
    shapes = [tuple(v.shape) for v in items.values()]
    dims = len(batch_size)
    while dims and len({s[:dims] if len(s) >= dims else None for s in shapes}) != 1:
        dims -= 1
    return sys.modules["tensordict"].TensorDict(items, batch_size=shapes[0][:dims] if shapes else batch_size)


class _Constants:
    """The attributes of a mapping that are constants."""

    def __init__(self, x: Any) -> None:
        self._keys = constant_attributes(x) if hasattr(x, "__dict__") else ()
        self.values = {name: getattr(x, name) for name, _ in self._keys}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constants) and self._keys == other._keys

    def __hash__(self) -> int:
        return hash(self._keys)


def _register_mapping(cls: Any) -> None:
    """Make a mapping a node. What is rebuilt has its entries and those of its attributes that are constants."""
    # Its own methods may do anything with entries.
    plain = issubclass(cls, dict) and cls.__new__ is dict.__new__
    wrapped = issubclass(cls, UserDict) and cls.__new__ is object.__new__

    def flatten(x: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
        items = x.data if wrapped else x
        read = dict.__getitem__ if plain else type(items).__getitem__
        given = tuple(dict.keys(x) if plain else items.keys())
        keys = tuple(sorted(given, key=lambda k: (type(k).__name__, k)))
        return [read(items, k) for k in keys], (_Keys(keys, given), _Constants(x)), keys

    def unflatten(aux: tuple[_Keys, _Constants], children: Iterable[Any]) -> Any:
        keys, attributes = aux
        items = keys.in_order(children)
        x = cls.__new__(cls) if plain or wrapped else cls(items)
        if plain:
            dict.update(x, items)
        elif wrapped:
            x.data = items
        for name, value in attributes.values.items():
            object.__setattr__(x, name, value)
        return x

    _register(cls, flatten, unflatten, path_entry_type=optree.GetItemEntry, namespace=NAMESPACE)


def _register_namedtuple(cls: Any) -> None:
    with warnings.catch_warnings():  # optree's, that it would be a node anyway
        warnings.simplefilter("ignore", UserWarning)
        _register(
            cls, lambda x: (tuple(x), None, None), lambda _, children: tuple.__new__(cls, children), namespace=NAMESPACE
        )


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


_seen: set[type] = set()


def _adopt(leaves: Iterable[Any]) -> bool:
    """Register containers among `leaves` that can be nodes; return whether there were any."""
    found = False
    for leaf in leaves:
        cls = type(leaf)
        if cls in _seen or isinstance(leaf, torch.Tensor):
            continue
        if _is_tensordict(cls):
            _register_tensordict(cls)
        elif dataclasses.is_dataclass(cls):
            _register_dataclass(cls)
        elif isinstance(leaf, Mapping):
            _register_mapping(cls)
        elif cls in torch_pytree_nodes and not issubclass(cls, tuple):  # torch.Size is a value
            _register_node_of_torch(cls)
        else:
            continue
        _seen.add(cls)
        found = True
    return found


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], PyTreeSpec]:
    """`tree` -> (leaves, treedef)."""
    leaves, treedef = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)
    if _adopt(x for x in leaves if is_leaf is None or not is_leaf(x)):
        return flatten(tree, is_leaf)
    return leaves, treedef


def orders(tree: Any) -> Any:
    """Return the orders in which the dicts of a tree have their keys, which `flatten` sorts: what runs through a dict
    sees its order. None for a tree without dicts. Namedtuples with a `__new__` of their own become nodes that are
    rebuilt without it.

    >>> orders([{"b": 1, "a": (2, {"c": 3})}, 4]), orders([1, (2, 3)])
    (((('b', 'a'), (((('c',), ()),),)),), None)
    """
    kind: Any = type(tree)
    holds = _holds(kind)
    if holds is None:
        return None
    if holds is Mapping:
        keys = tuple([key if type(key) is str else (type(key), repr(key)) for key in tree.keys()])  # 1 is not True
        return keys, tuple([found for x in tree.values() if (found := orders(x)) is not None])
    inside = tree if holds is list else [getattr(tree, name) for name in attributes_of(tree)]
    return tuple([found for x in inside if (found := orders(x)) is not None]) or None


@functools.cache
def _holds(kind: Any) -> Any:
    """Return how a container of a class holds its entries: `Mapping`, `list`, or `object`, a dataclass's attributes.
    None for what is no container.
    """
    if issubclass(kind, Mapping) or _is_tensordict(kind):
        return Mapping
    if issubclass(kind, tuple | list):
        if optree.is_namedtuple_class(kind) and kind.__new__.__code__.co_filename != "<string>":
            _register_namedtuple(kind)
        return list
    return object if dataclasses.is_dataclass(kind) else None


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
    """`f` at every leaf of `tree` (and of `rest`, which must have the same structure).

    On `Sharded` trees the leaves are this rank's shards, so an elementwise `f` is the partitioned update.

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
