"""Checks of arguments by annotations."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zerofn.comm.mesh import Axis, Mesh
from zerofn.util.arguments import check_fields, checked, told, unchecked


@checked()
def takes(
    flag: bool = True,
    whole: int = 1,
    number: float = 1.0,
    text: str = "",
    path: str | os.PathLike[str] = "x",
    tensor: Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    module: nn.Module | None = None,
    function: Callable[[str], bool] | None = None,
    table: Mapping[str, Tensor | int] | None = None,
    several: Sequence[int] = (),
    loader: Iterable[int] = (),
    axis: str | Axis | None = None,
    mesh: Mesh | None = None,
    other: SomethingElse | None = None,  # noqa: F821
    *rest: int,
    **more: int,
) -> str:
    return "taken"


GOOD = {
    "flag": [True, np.bool_(False)],
    "whole": [3, np.int64(3), -1],
    "number": [3, 0.5, math.inf, np.float32(1)],
    "text": ["", "a"],
    "path": ["a", Path("a")],
    "tensor": [None, torch.ones(2), nn.Parameter(torch.ones(2))],
    "dtype": [None, torch.float32],
    "device": [None, "cpu", "cuda:1", torch.device("meta")],
    "module": [None, nn.Linear(1, 1)],
    "function": [None, len, nn.Linear(1, 1)],
    "table": [None, {}, {"a": 1}],
    "several": [(), [1]],
    "loader": [[], "ab", iter([1]), torch.ones(2), range(3)],
    "axis": [None, "data", Axis("data", 1)],
    "mesh": [None, Mesh.of(None)],
    "other": [None, 3, "x"],
}
BAD = {
    "flag": ([1, "True", None], "True or False"),
    "whole": ([1.0, True, "1", math.nan, None, [1]], "a whole number"),
    "number": ([math.nan, True, "1", 1j, None], "a number"),
    "text": ([3, b"a", ["a"], None], "a string"),
    "path": ([3, "", None, ["a"]], "a path"),
    "tensor": ([3.0, [1.0], "x"], "a tensor or None"),
    "dtype": (["float32", 3], "a torch.dtype or None"),
    "device": (["nowhere", 3.5, []], "a device or None"),
    "module": ([len, 3], "a module or None"),
    "function": ([3, "f", lambda: 0, lambda a, b: 0], "a function of 1 argument or None"),
    "table": ([3, [("a", 1)]], "a dict or None"),
    "several": (["01", 3, None, iter([1]), [1.0], ["1"], (True,)], "a list or tuple of whole numbers"),
    "loader": ([3, None], "an iterable"),
    "axis": ([3, ["data"]], "a string, an Axis or None"),
    "mesh": ([3, "data"], "a Mesh or None"),
}


def test_what_annotations_say_is_taken():
    for name, values in GOOD.items():
        assert [takes(**{name: value}) for value in values] == ["taken"] * len(values)
    assert takes(True, 1, 1.0, more="x") == "taken"


@pytest.mark.parametrize("name", BAD)
def test_anything_else_is_a_sentence_with_the_name(name):
    values, words = BAD[name]
    for value in values:
        with pytest.raises(ValueError if value != value else TypeError) as caught:
            takes(**{name: value})
        assert str(caught.value) == f"takes: {name} must be {words}, got {told(value)}."


def test_arguments_by_place_are_looked_at_too():
    with pytest.raises(TypeError, match="takes: whole must be a whole number, got '2'"):
        takes(True, "2")


def test_what_comes_after_a_star_is_told_by_name_alone():
    @checked()
    def some(a: int, *rest: int, flag: bool = True) -> int:
        return len(rest)

    assert some(1, "x", "y") == 2
    with pytest.raises(TypeError, match="some: flag must be True or False, got 'x'"):
        some(1, 2, flag="x")


def test_only_the_named_parameters():
    @checked("b")
    def some(a: int, b: int) -> int:
        return 1

    assert some("x", 2) == 1
    with pytest.raises(TypeError, match=r"some: b must be a whole number, got a tensor of shape \[3\]"):
        some(1, torch.ones(3))


def test_a_class_is_named_by_itself():
    class Run:
        @checked()
        def __init__(self, every: int) -> None:
            """Nothing."""

        @checked()
        def step(self, every: int) -> None:
            """Nothing."""

    for call, where in ((lambda: Run("x"), "Run"), (lambda: Run(1).step("x"), "Run.step")):
        with pytest.raises(TypeError, match=rf"{where}: every must be a whole number"):
            call()


def test_fields_of_a_dataclass():
    @dataclass
    class Options:
        rate: float = 1.0
        name: str = "x"

        def __post_init__(self) -> None:
            check_fields(self)

    assert Options(2).rate == 2
    for wrong, error in ((math.nan, ValueError), ("2", TypeError)):
        with pytest.raises(error, match=f"Options: rate must be a number, got {wrong!r}"):
            Options(wrong)


def test_what_is_checked_is_found_in_its_wrapper():
    def plain(a: int) -> int:
        return a

    assert unchecked(checked()(plain)) is plain and unchecked(plain) is plain and unchecked(takes) is not takes


@checked("x")
def stretched(x: int, *, factor: float = 1.0, places: int = 2) -> float:
    return round(x * factor, places)


def test_a_misspelt_argument_gets_the_nearest_name_and_another_one_all_names():
    assert stretched(2, factor=1.5) == 3.0
    with pytest.raises(TypeError, match=r"stretched has no argument 'facter'\. Did you mean 'factor'\?"):
        stretched(2, facter=1.5)
    with pytest.raises(TypeError, match=r"no argument 'verbose'\. Write one of 'x', 'factor', 'places'\."):
        stretched(2, verbose=True)


def test_a_function_of_any_names_takes_them():
    assert checked()(lambda x, **rest: rest)(1, more=2) == {"more": 2}
