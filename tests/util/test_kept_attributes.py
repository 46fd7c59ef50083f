"""Which attributes of a container those that are rebuilt have."""

import functools

import pytest
import torch

from zerofn.util.kept_attributes import Constants, is_pythons, own_names, trees_and_constants


class Bag(dict):
    __slots__ = ("__dict__", "a", "b")
    answered = None

    @functools.cached_property
    def total(self):
        return sum(self.values())


def bag(**attributes):
    made = Bag(x=1)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_names_are_in_one_order_and_without_what_is_computed_anew():
    made = bag(z=1, b=2, y=3)
    assert made.total == 1 and "total" in vars(made)
    assert own_names(made) == ["b", "y", "z"] and own_names(3) == own_names([1]) == []


def test_trees_and_constants_are_kept_and_what_the_class_would_answer():
    found = {"tensor": torch.ones(1), "text": "a", "record": object(), "answered": object()}
    trees, constants = trees_and_constants(bag(**found), found, lambda x: isinstance(x, torch.Tensor))
    assert list(trees) == ["tensor", "answered"] and constants.values == {"text": "a"}


@pytest.mark.parametrize(
    ("a", "b", "equal"), [(0.0, 0.0, True), (0.0, -0.0, False), (1, True, False), ("a", "a", True)]
)
def test_constants_are_equal_if_no_step_can_tell(a, b, equal):
    assert (Constants({"k": a}) == Constants({"k": b})) == equal
    assert not equal or hash(Constants({"k": a})) == hash(Constants({"k": b}))


def test_names_of_pythons_own():
    assert is_pythons("__orig_class__") and not is_pythons("_a") and not is_pythons("__a")
