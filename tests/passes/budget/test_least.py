"""The least budget that an error names does, and one page less does not, for any model."""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.small_steps import fake_ranks, step_with
from zerofn import optim
from zerofn.passes.budget.search import PAGE

MB = 1_000_000


class Block(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def lowering(num_blocks, width, rows, one_unit, stage, num_microbatches=1):
    """A function from a budget, or remat=, to a step's plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
    unit = (lambda name: "all") if one_unit else (lambda name: name.split(".")[0])
    plain = zerofn.TrainState.create(params=dict(model.named_parameters()), tx=optim.adamw(1e-3))
    state, batch = zerofn.shard(plain, stage, unit=unit), torch.randn(rows, width)
    step = step_with(lambda params, x: functional_call(model, params, (x,)).square().mean(), num_microbatches)
    return lambda **options: zerofn.compile(step, **options).lower(state, batch)


def least(lowered, budget):
    """The bytes that an error about `budget` names."""
    with pytest.raises(MemoryError, match="cannot be scheduled within") as error:
        lowered(memory=budget)
    return int(re.findall(r"[\d,]{4,}", str(error.value))[-1].replace(",", ""))


@pytest.mark.parametrize("num_models", [2, pytest.param(10, marks=pytest.mark.whole)])
def test_what_is_named_works_and_a_page_less_does_not(num_models):
    @settings(max_examples=num_models, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        world=st.integers(1, 3),
        num_blocks=st.integers(1, 5),
        width=st.sampled_from([8, 24, 33]),
        rows=st.sampled_from([6, 60, 600, 2400]),
        one_unit=st.booleans(),
        stage=st.integers(0, 3),
        num_microbatches=st.integers(1, 2),
    )
    def it_does(world, **model):
        with fake_ranks(world):
            lowered = lowering(**model)
            named = least(lowered, 10)
            assert lowered(memory=named).memory().total <= named
            assert least(lowered, named - PAGE) == named
            assert least(lowered, named // 2) == named

    it_does()


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (2, 1), (2, 3), (3, 2)])
@pytest.mark.whole
def test_one_unit_takes_as_little_as_many(world, stage):
    """4.7 MB at one rank; before a unit was cut at its leaves, errors named 10.0 MB."""
    with fake_ranks(world):
        lowered = lowering(4, 32, 2000, True, stage)
        one, many = (least(lowering(4, 32, 2000, one_unit, stage), 3 * MB) for one_unit in (True, False))
        assert one < 1.05 * many < 0.5 * lowered().memory().total
        assert lowered(remat="full").memory().total < 0.5 * lowered().memory().total
