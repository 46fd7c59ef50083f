"""Two captures of one step are compared operation by operation, and constant by constant."""

import re

import pytest
import torch

import zerofn
from zerofn.capture.checked_capture import captured_with_outline
from zerofn.graph.same_graph import difference

STATE, X = {"w": torch.ones(4)}, torch.ones(4, 2)
LARGE, EQUAL = torch.arange(4000.0), torch.arange(4000.0)


def outline(step, state=STATE, x=X, traces=False):
    return captured_with_outline(step, state, x, traces)[0].outline


def loop(n, scale):
    def step(state, x):
        vg = zerofn.accumulate(zerofn.value_and_grad(lambda p, x: (p["w"] * x.sum() * scale).sum()), n)
        return vg(state, x)[0]

    return step


PAIRS = {
    "a number": (lambda s, x: x * 2.0, lambda s, x: x * 3.0, "2.0.* is now .*3.0"),
    "another operation": (lambda s, x: x.sin(), lambda s, x: x.cos(), "aten.sin.* is now aten.cos"),
    "one more": (lambda s, x: x.sin(), lambda s, x: x.sin().cos(), "is now"),
    "a shape": (lambda s, x: torch.zeros(2), lambda s, x: torch.zeros(3), r"\[2\].* is now .*\[3\]"),
    "a small constant": (
        lambda s, x: x * torch.tensor(2.0),
        lambda s, x: x * torch.tensor(3.0),
        r"shape \[\] holds other",
    ),
    "a large constant": (lambda s, x: LARGE + 1, lambda s, x: (LARGE + 1.0).flip(0), "is now"),
    "a returned number": (lambda s, x: (x, {"lr": 1.0}), lambda s, x: (x, {"lr": 0.5}), "returns .*1.0 is now .*0.5"),
    "in a loop": (loop(2, 1.5), loop(2, 2.5), "1.5.* is now .*2.5"),
    "rounds of a loop": (loop(2, 1.5), loop(4, 1.5), "is now"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_difference_is_told(name):
    before, now, message = PAIRS[name]
    assert difference(outline(before), outline(before)) == ""
    found = difference(outline(before), outline(now))
    assert re.search(message, found), found


def test_equal_constants_are_equal_wherever_they_lie():
    assert difference(outline(lambda s, x: LARGE * 2), outline(lambda s, x: EQUAL * 2)) == ""
    assert difference(outline(lambda s, x: LARGE * 2), outline(lambda s, x: (EQUAL - 1) * 2))


def test_with_lines_a_difference_names_its_line():
    now = outline(lambda s, x: x * 3.0, traces=True)
    assert f" at {__file__}:" in difference(outline(lambda s, x: x * 2.0), now)
