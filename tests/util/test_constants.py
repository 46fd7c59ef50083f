"""Which values a captured step may hold, and which of them it cannot tell apart."""

import datetime
import decimal
import enum
import functools
import math
import pathlib

import numpy as np
import pytest
import torch

from zerofn.util.constants import is_constant, key_of


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Text(str):
    pass


class Equal:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


CONSTANTS = [
    0, False, 1, True, 0.0, -0.0, 1.0, math.inf, math.nan, 0j, -0j, complex(0.0, -0.0), "", "1", b"1", None, ...,
    torch.float32, torch.int32, torch.device("cpu"), torch.device("cuda", 0), torch.strided, torch.channels_last,
    torch.Size([1, 2]), (1, 2), (1.0, 2), (True, 2), (0.0,), (-0.0,), slice(0, 1), slice(False, 1), slice(None),
    range(0, 3, 2), range(0, 4, 2), frozenset({1}), frozenset({1.0}), frozenset({True}), frozenset({0.0}),
    frozenset({-0.0}), Colour.RED, Colour.BLUE, Level.LOW, Level.HIGH, Level.LOW | Level.HIGH, np.float32(0.0),
    np.float32(-0.0), np.float64(0.0), np.int64(0), np.bool_(False), np.str_("1"), np.dtype("float32"),
    np.datetime64("2026-01-01"), decimal.Decimal("1"), decimal.Decimal("1.0"), pathlib.PurePosixPath("a"),
    datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1), datetime.timedelta(1),
]  # fmt: skip


def test_a_step_can_tell_all_of_these_apart():
    keys = [key_of(x) for x in CONSTANTS]
    equal = [(CONSTANTS[i], CONSTANTS[k]) for i in range(len(keys)) for k in range(i) if keys[i] == keys[k]]
    assert not equal
    assert len(set(keys)) == len(keys)


def test_the_same_value_made_again_has_the_same_key():
    again = [0, float("0"), float("-0.0"), float("nan"), -(0j), slice(0, 1), frozenset({-0.0}), Level(3), np.float32(0)]
    assert all(key_of(x) in {key_of(y) for y in CONSTANTS} for x in again)


@pytest.mark.parametrize(
    "x",
    [
        object(),
        Equal(1),
        Equal,
        Text("a"),
        (1, Equal(1)),
        frozenset({Equal(1)}),
        slice(0, Equal(1)),
        lambda x: x,
        torch.relu,
        functools.partial(torch.relu),
        torch.nn.Linear(1, 1),
        torch.Generator(),
        np.ones(2),
        np.ones(2, dtype=[("a", object)])[0],
        {1},
        [1],
        range,
    ],
)
def test_what_may_change_is_no_constant(x):
    assert not is_constant(x)
