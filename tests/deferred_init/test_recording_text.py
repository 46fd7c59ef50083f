"""What two recordings compare: equal lines mean equal values, and a line names what differs."""

import numpy as np
import pytest
import torch
from torch import nn

from zerofn.deferred_init import record


def lines(init):
    replay = record(init)
    return replay.lines([str(k) for k in range(len(replay.leaves))])


def drawn(gain=1.0, seed=3, given=1.0, first=0):
    """A leaf of each kind: drawn, drawn by a sampler, drawn from a generator of its own, and given."""
    if first:
        torch.randn(first)
    own = torch.Generator().manual_seed(seed)
    sampled = nn.init.trunc_normal_(torch.empty(4), std=gain)
    array = torch.from_numpy(np.arange(9.0) * given)
    return [torch.randn(3, 2) * gain, sampled, torch.rand(2, generator=own), array + 1, torch.full((), given)]


def test_two_recordings_of_one_function_have_equal_lines():
    assert lines(drawn) == lines(drawn)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"gain": 0.5}, "mul.Tensor(value 5 [3, 2] float32, 0.5)"),
        ({"seed": 4}, "of seed 4"),
        ({"given": 2.0}, "full([], 2.0"),
        ({"first": 1}, "randn([1]"),
    ],
)
def test_a_line_names_what_differs(change, named):
    plain, other = lines(drawn), lines(lambda: drawn(**change))
    assert plain != other
    assert any(named in line for line in set(other) - set(plain)), set(other) - set(plain)


def test_a_state_set_inside_is_named_by_its_seed():
    def init(seed):
        torch.manual_seed(seed)
        return [torch.randn(2)]

    assert "of seed 5" in lines(lambda: init(5))[0] and lines(lambda: init(5)) != lines(lambda: init(6))
    torch.manual_seed(1)
    one = lines(lambda: [torch.randn(2)])
    torch.manual_seed(2)
    assert one == lines(lambda: [torch.randn(2)])  # the default generator's state is compared apart


def test_what_no_leaf_needs_has_no_line():
    def asks():
        torch.ones(5).sum().item()
        return drawn()

    assert lines(asks) == lines(drawn)


def test_a_constant_is_named_by_its_leaf_and_values():
    (line,) = set(lines(lambda: [torch.arange(3.0)])) - {"0 is 0 [3] float32"}
    assert "arange" in line
    weight = torch.arange(9.0)
    assert lines(lambda: [weight])[-1].startswith("0 is given: 0.0, 1.0, 2.0, 3.0, ... ")
    assert lines(lambda: [weight]) != lines(lambda: [weight.flip(0)])
