"""Entries of mappings as they are kept."""

from collections import ChainMap, OrderedDict, UserDict
from types import MappingProxyType

import pytest

from zerofn.util.mappings import base_of, is_tensordict, ways_of


class Doubled(dict):
    def __getitem__(self, key):
        return super().__getitem__(key) * 2


class Wrapped(UserDict):
    def __getitem__(self, key):
        return super().__getitem__(key) * 2


class Ordered(OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value * 2)


@pytest.mark.parametrize("kind", [Doubled, Wrapped, MappingProxyType])
def test_entries_are_those_that_are_kept(kind):
    x = kind({"b": 1, "a": 2})
    entries_of, make = ways_of(kind)
    entries, keys, names = entries_of(x)
    assert entries == [2, 1] and names == ("a", "b") and list(make(keys, entries)) == ["b", "a"]
    assert make(keys, entries) == x and type(make(keys, [3, 4])) is kind


def test_an_ordered_dict_keeps_its_order():
    x = Ordered(b=1, a=2)
    x.move_to_end("b")
    entries_of, make = ways_of(Ordered)
    entries, keys, _ = entries_of(x)
    assert list(make(keys, entries).items()) == list(x.items()) == [("a", 4), ("b", 2)]


def test_a_class_in_python_may_keep_its_entries_anywhere():
    assert ways_of(ChainMap) is None
    assert base_of(ChainMap) is base_of(int) is None and base_of(Doubled) is dict and base_of(Ordered) is OrderedDict
    assert not is_tensordict(dict)
