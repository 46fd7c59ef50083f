"""Tree order and key paths, against torch's own pytrees and by hand."""

import subprocess
import sys
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import pytest
import torch
from tensordict import TensorDict

from zerofn import tree

Point = namedtuple("Point", "x y")


@dataclass
class Batch:
    tokens: Any
    labels: Any = None
    note: Any = field(default=0)


@dataclass(frozen=True)
class Inner:
    w: Any


def nests():
    a, b, c = (torch.full((2,), float(i)) for i in range(3))
    return {
        "dict": {"z": a, "b": b},
        "list and tuple": [a, (b, c), ()],
        "namedtuple": Point(a, [b]),
        "dataclass": Batch(a, b),
        "frozen dataclass": Inner({"w": a}),
        "dataclasses in each other": Batch(Inner(a), [Inner(b)], Batch(c, None)),
        "TensorDict": TensorDict({"a": a, "b": TensorDict({"c": b}, [2])}, [2]),
        "None and numbers": {"n": None, "i": 3, "f": 1.5, "b": True},
        "ordered": OrderedDict(z=a, b=b),
        "a leaf": a,
        "nothing": {},
    }


@pytest.mark.parametrize("name", list(nests()))
def test_flatten_and_back(name):
    value = nests()[name]
    leaves, treedef = tree.flatten(value)
    back = tree.unflatten(treedef, leaves)
    assert type(back) is type(value)
    assert tree.structure(back) == treedef
    assert all(x is y for x, y in zip(tree.leaves(back), leaves, strict=True))
    paths, again, _ = tree.flatten_with_path(value)
    assert len(paths) == len(leaves) == treedef.num_leaves
    assert all(x is y for x, y in zip(again, leaves, strict=True))
    assert len(set(map(tree.name_of, paths))) == len(paths)


def test_dict_order_does_not_matter():
    a, b = {"x": 1, "w": {"d": 2, "c": 3}}, {"w": {"c": 3, "d": 2}, "x": 1}
    assert tree.flatten(a) == tree.flatten(b)
    assert tree.leaves(a) == [3, 2, 1]


def test_tensordict_order_does_not_matter():
    a = TensorDict({"x": torch.ones(2), "w": torch.zeros(2)}, [2])
    b = TensorDict({"w": torch.zeros(2), "x": torch.ones(2)}, [2])
    assert tree.structure(a) == tree.structure(b)
    assert [x.sum().item() for x in tree.leaves(a)] == [x.sum().item() for x in tree.leaves(b)] == [0, 2]


def test_names():
    value = {"a": [1, {"b.c": 2}], "p": Point(3, 4), "d": Batch(5, 6)}
    paths, leaves, treedef = tree.flatten_with_path(value)
    assert [tree.name_of(p) for p in paths] == ["a.0", "a.1.b.c", "d.tokens", "d.labels", "d.note", "p.0", "p.1"]
    assert tree.field_names(treedef)[-2:] == ["p.x", "p.y"]
    nested = TensorDict({"a": {"b": torch.ones(1)}}, [])
    assert tree.name_of(tree.flatten_with_path(nested)[0][0]) == "a.b"


def test_tree_map_meets_none_and_several_trees():
    out = tree.tree_map(lambda x, y: x + y, {"a": 1, "n": None}, {"a": 2, "n": None})
    assert out == {"a": 3, "n": None}
    with pytest.raises(ValueError):
        tree.tree_map(lambda x, y: x, {"a": 1}, {"b": 1})
    doubled = tree.tree_map(lambda x: x * 2, Batch(torch.ones(1), Point(1, 2)))
    assert doubled.labels == Point(2, 4) and doubled.tokens.item() == 2
    assert tree.tree_map(lambda x, y: x + y, Inner(1), Inner(2)) == Inner(3)


def test_tensordict_keeps_a_batch_size_that_fits():
    value = TensorDict({"a": torch.ones(4, 3), "b": torch.ones(4)}, [4])
    cut = tree.tree_map(lambda x: x[:2], value)
    assert isinstance(cut, TensorDict) and cut.batch_size == (2,)
    stacked = tree.tree_map(lambda x: torch.stack([x, x]), value)
    assert stacked["a"].shape == (2, 4, 3) and stacked.batch_size == (2,)
    summed = tree.tree_map(lambda x: x.sum(), value)
    assert summed.batch_size == ()
    uneven = tree.unflatten(tree.structure(value), [torch.ones(4, 3), torch.ones(5)])
    assert uneven.batch_size == ()


TRAINS_ON_A_TENSORDICT = """
import sys
import torch
import zerofn
from zerofn import optim


def loss_fn(params, batch):
    return ((batch["x"] @ params["w"]["a"] - batch["y"]) ** 2).mean()


def train_step(state, batch):
    loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), 2)(batch)
    return state.apply_gradients(grads), {"loss": loss, "seen": batch}


def trained(of, batch_of):
    def init():
        return zerofn.TrainState.create(params=of({"w": of({"a": torch.ones(3, 2)})}), tx=optim.adamw(0.1))

    state, batch = zerofn.shard(init, stage=3), batch_of({"x": torch.ones(4, 3), "y": torch.zeros(4, 2)})
    step = zerofn.compile(train_step)
    for _ in range(2):
        state, metrics = step(state, batch)
    assert type(metrics["seen"]) is type(batch)
    return zerofn.unshard(state).params["w"]["a"]


expected = trained(dict, dict)
assert "tensordict" not in sys.modules
from tensordict import TensorDict

assert torch.equal(trained(TensorDict, lambda x: TensorDict(x, [4])), expected)
"""


@pytest.mark.whole
@pytest.mark.slow
def test_a_tensordict_may_be_imported_after_the_first_tree():
    subprocess.run([sys.executable, "-c", TRAINS_ON_A_TENSORDICT], check=True, timeout=120)


def test_is_leaf_stops():
    value = {"a": (1, 2), "b": Batch(1, 2)}
    leaves = tree.leaves(value, is_leaf=lambda x: isinstance(x, tuple | Batch))
    assert leaves == [(1, 2), value["b"]]


def test_natural_order():
    names = ["h.10.w", "h.2.w", "h.2.b", "ln_f", "h.1.1", "h.1.0", "emb.w"]
    paths = sorted(((n,) for n in names), key=tree.natural_key)
    assert [p[0] for p in paths] == ["emb.w", "h.1.0", "h.1.1", "h.2.b", "h.2.w", "h.10.w", "ln_f"]
    assert tree.natural_key(("h", 10, "w")) == tree.natural_key(("h.10.w",))
    assert tree.components(("a.01.b", 3)) == ("a", 1, "b", 3)


def test_registered_nodes_are_torchs_too():
    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

    tree.register_node(Pair, lambda p: ((p.a, p.b), "aux"), lambda aux, children: Pair(*children))
    out = torch.vmap(lambda p: p.a + p.b)(Pair(torch.ones(3), torch.ones(3)))
    assert out.tolist() == [2, 2, 2]
    assert tree.leaves([Pair(1, 2)]) == [1, 2]


@dataclass
class Scaled:
    """Its `__post_init__` does to an argument what must be done once."""

    x: Any
    scale: InitVar[float] = 1.0
    rows: int = field(init=False, default=0)

    def __post_init__(self, scale):
        self.x = self.x * scale
        self.rows = len(self.x)
        self.mean = self.x.mean()  # no field

    @cached_property
    def twice(self):
        return self.x * 2


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any = field(init=False)


class Doubled(namedtuple("Doubled", "x y")):
    def __new__(cls, x, y):
        return super().__new__(cls, x * 2, y)


class Entries(dict):
    def __init__(self, items=(), name="none"):
        super().__init__(items)
        self.name = name

    def __getitem__(self, key):
        return super().__getitem__(key) * 2


def test_a_dataclass_is_rebuilt_as_it_is_and_not_made_again():
    x = Scaled(torch.ones(3), scale=2.0)
    assert x.twice.sum() == 12  # which is kept in __dict__
    again = tree.tree_map(lambda value: value, x)
    assert torch.equal(again.x, torch.full((3,), 2.0)) and again.rows == 3 and again.mean is x.mean
    assert [tree.name_of(p) for p in tree.flatten_with_path(x)[0]] == ["x", "rows", "mean"]
    assert "twice" not in vars(again) and again.twice.sum() == 12
    slotted = Slotted(torch.ones(2))
    assert len(tree.leaves(slotted)) == 1 and not hasattr(tree.tree_map(lambda value: value, slotted), "y")


class Wrapped(UserDict):
    def __init__(self, name, items):
        super().__init__(items)
        self.name = name

    def __getitem__(self, key):
        return super().__getitem__(key) * 2


def test_a_mapping_that_wraps_a_dict_is_rebuilt_as_it_is():
    x = Wrapped("rows", {"x": torch.ones(2)})
    again = tree.tree_map(lambda value: value + 1, x)
    assert type(again) is Wrapped and again.name == "rows" and torch.equal(again["x"], torch.full((2,), 4.0))


def test_a_dict_of_a_class_of_its_own_is_rebuilt_as_it_is():
    x = Entries({"b": torch.ones(2), "a": torch.zeros(2)}, name="rows")
    again = tree.tree_map(lambda value: value + 1, x)
    assert type(again) is Entries and again.name == "rows" and list(again) == ["b", "a"]
    assert torch.equal(again["b"], torch.full((2,), 4.0))  # (1 + 1) * 2
    assert tree.structure(x) != tree.structure(Entries(dict.items(x), name="others"))


def test_a_namedtuple_that_computes_is_not_made_again():
    x = [Doubled(torch.ones(2), {"b": 1})]
    tree.orders(x)  # makes a node of it
    assert torch.equal(tree.tree_map(lambda value: value, x)[0].x, torch.full((2,), 2.0))


class Shown(Mapping):
    """Its items are computed from what it keeps, in whatever way."""

    def __new__(cls, *args):
        return super().__new__(cls)

    def __init__(self, items, scale):
        self.kept, self.scale = dict(items), scale

    def __getitem__(self, key):
        return self.kept[key] * self.scale

    def __iter__(self):
        return iter(self.kept)

    def __len__(self):
        return len(self.kept)


class InSlots(Shown):
    __slots__ = ("kept", "scale")


class Bag(dict):
    weights = None
    __slots__ = ("bias", "__dict__")


class Ordered(OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value * 2)


class Measured(namedtuple("Measured", "x y")):
    def __new__(cls, x, y):
        made = super().__new__(cls, x * 2, y)
        made.mean, made.name = x.mean(), "rows"
        return made


T = TypeVar("T")


@dataclass
class Box(Generic[T]):
    x: Any


@pytest.mark.parametrize("kind", [Shown, InSlots])
def test_a_mapping_of_ones_own_is_rebuilt_of_what_it_keeps(kind):
    x = kind({"b": torch.ones(2), "a": torch.zeros(2)}, 3.0)
    again = tree.unflatten(*reversed(tree.flatten(x)))
    assert type(again) is kind and list(again) == ["b", "a"]
    assert torch.equal(again["b"], torch.full((2,), 3.0)) and torch.equal(x["b"], again["b"])
    assert [tree.name_of(p) for p in tree.flatten_with_path(x)[0]] == ["kept.a", "kept.b", "scale"]


def test_a_dict_of_a_class_of_its_own_keeps_its_tensors_and_trees():
    x = Bag(x=torch.ones(2))
    x.weights, x.bias, x.more, x.name = torch.ones(2), torch.zeros(2), [{"y": torch.ones(2)}], "rows"
    again = tree.tree_map(lambda value: value + 1, x)
    assert again.name == "rows" and list(again) == ["x"]
    for value, expected in ((again["x"], 2), (again.weights, 2), (again.bias, 1), (again.more[0]["y"], 2)):
        assert torch.equal(value, torch.full((2,), float(expected)))
    assert tree.orders(x) == tree.orders(again)


def test_what_is_no_tree_is_left_out_unless_the_class_would_answer():
    x = Bag(x=torch.ones(2))
    x.me = [x]
    with pytest.raises(TypeError, match=r"A tree has no end: 'me.0', a Bag, contains itself"):
        tree.flatten(x)
    del x.me
    x.record = [object()]
    assert not hasattr(tree.tree_map(lambda value: value, x), "record")
    x.weights = kept = object()
    assert tree.leaves(x)[1:] == [kept]  # a leaf, which compile refuses by its name


def test_the_order_of_an_ordered_dict_of_ones_own_is_kept():
    x = Ordered(b=torch.ones(2), a=torch.ones(2))
    x.move_to_end("b")
    again = tree.tree_map(lambda value: value, x)
    assert type(again) is Ordered and list(again) == ["a", "b"] and torch.equal(again["b"], torch.full((2,), 2.0))
    assert tree.orders(x) == tree.orders(again) != tree.orders(Ordered(b=1, a=1))


def test_a_namedtuple_keeps_its_attributes():
    x = Measured(torch.ones(2), 1)
    tree.orders(x)  # makes a node of it
    again = tree.tree_map(lambda value: value, x)
    assert torch.equal(again.x, torch.full((2,), 2.0)) and again.mean == 1 and again.name == "rows"
    assert [tree.name_of(p) for p in tree.flatten_with_path(x)[0]] == ["x", "y", "mean"]


def test_a_generic_dataclass_keeps_its_class():
    x = Box[int](torch.ones(2))
    again = tree.tree_map(lambda value: value + 1, x)
    assert torch.equal(again.x, torch.full((2,), 2.0)) and again.__orig_class__ == Box[int]
    assert tree.structure(x) == tree.structure(again) != tree.structure(Box[str](1))


def test_a_tree_that_holds_itself_is_refused_by_the_place():
    x = {"a": {"b": [1]}}
    x["a"]["b"].append(x["a"])
    for call in (tree.flatten, tree.orders, tree.structure, lambda x: tree.tree_map(str, x)):
        with pytest.raises(
            TypeError, match=r"A tree has no end: 'a.b.1', a dict, contains itself. Leave that entry out"
        ):
            call(x)
    deep = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TypeError, match=r"A tree has more than 200 nested levels"):
        tree.flatten(deep)
