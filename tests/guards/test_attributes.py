"""What a reading tells apart by value, and which attributes it may meet."""

import argparse
import dataclasses
import enum
import functools
import types
from typing import NamedTuple

import pytest
import torch
from torch import nn

from zerofn.guards.attributes import (
    attributes_of,
    held,
    is_config,
    own_attributes,
    parts_of,
    shown,
    special_methods,
    told_by_value,
)


class Colour(enum.Enum):
    RED, BLUE = 1, 2


class Mode(str, enum.Enum):
    FAST, SLOW = "fast", "slow"


class Metres(float):
    def __repr__(self):
        return "some metres"


class Name(str):
    pass


class Pair(NamedTuple):
    a: int
    b: int


@dataclasses.dataclass
class Fields:
    a: int = 1


class ModelConfig:
    pass


class Slotted:
    __slots__ = ("a",)


class Plain:
    b = 2

    def __init__(self):
        self.a = 1


@pytest.mark.parametrize(
    "a, b, equal",
    [
        (Colour.RED, Colour.RED, True),
        (Colour.RED, Colour.BLUE, False),
        (Mode.FAST, Mode.SLOW, False),
        (Metres(1.0), Metres(1.0), True),
        (Metres(1.0), Metres(2.0), False),
        (Metres(0.0), Metres(-0.0), False),
        (Name("a"), Name("b"), False),
        (Name("1.0"), Metres(1.0), False),
    ],
)
def test_members_and_numbers_of_ones_own_classes(a, b, equal):
    assert told_by_value(a) is not None
    assert (told_by_value(a) == told_by_value(b)) is equal


@pytest.mark.parametrize("x", [1.0, "a", b"a", True, None, Plain(), [1], Pair(1, 2), torch.ones(1)])
def test_others_are_told_apart_elsewhere(x):
    assert told_by_value(x) is None


def test_enum_members_and_numbers_of_a_subclass_are_told_by_name():
    assert told_by_value(Colour.RED)[2] == "Colour.RED" and told_by_value(Metres(2))[2] == "Metres(2.0)"


def test_attributes():
    assert {"a", "b", "__init__"} <= attributes_of(Plain()) and "a" not in attributes_of(Plain)
    assert "a" in attributes_of(Slotted()) and "RED" in attributes_of(Colour)


def test_special_methods():
    class Items(Plain):
        def __getitem__(self, k):
            return k

        def __repr__(self):
            return "items"

    assert special_methods(Items()) == {"__getitem__", "__repr__"}
    assert special_methods(Items) == {"__getitem__", "__repr__", "__init__"}
    assert special_methods(nn.ReLU()) == special_methods([1]) == set()
    assert special_methods(Fields()) <= {"__repr__"} and special_methods(Fields) - {"__repr__"} == {"__init__"}


def test_attributes_of_what_answers_to_every_name():
    class Proxy:
        __slots__ = ()

        def __getattr__(self, name):
            return 7

    assert own_attributes(Proxy()) == {} and "__getattr__" in attributes_of(Proxy())
    assert own_attributes(Plain()) == {"a": 1} and "b" in own_attributes(Plain)


@pytest.mark.parametrize("x", [types.SimpleNamespace(a=1), argparse.Namespace(a=1), Fields(), ModelConfig()])
def test_configs(x):
    assert is_config(x)
    assert not is_config(type(x))


def test_the_functions_that_attributes_run():
    def f(self):
        return self

    kept = [staticmethod(f), classmethod(f), property(f), functools.cached_property(f), functools.partial(f)]
    assert parts_of(f) == {"": f} and all(f in parts_of(x).values() for x in kept)
    assert parts_of(functools.partialmethod(f, 1, a=2)) == {".func": f, ".args": (1,), ".keywords": {"a": 2}}
    assert parts_of(3) == parts_of(len) == parts_of(functools) == {}


def test_cells_and_keys():
    x = 1

    def reads():
        return x, later

    assert held(reads.__closure__[1]) == 1 and repr(held(reads.__closure__[0])) == "nothing"
    later = 2
    assert held(reads.__closure__[0]) == 2
    assert shown("a") == "'a'" and shown(k := Plain()) == f"Plain {id(k)}"
