import pytest
import torch
from torch.func import functional_call

from tests.support.same import assert_same_trees
from tests.support.small_steps import SCHEDULE, captured, results, state_of, step_with
from zerofn.passes.reinplace import SMALLEST, reinplace

aten = torch.ops.aten
X = torch.randn(64, SMALLEST // 64)


def program_of(fn, *passes):
    """`fn(x)` of the batch, as a step that returns it."""

    def step(state, batch):
        return fn(batch["x"])

    return captured(step, {"params": {"a": torch.ones(2)}}, {"x": X}, *passes)


def written(program):
    """The operands that are written over."""
    return [n.kwargs[k] for n in program.gm.graph.nodes for k in ("out", "grad_input") if k in n.kwargs]


def both(fn):
    state, batch = {"params": {"a": torch.ones(2)}}, {"x": X}
    before, after = program_of(fn), program_of(fn, reinplace)
    assert_same_trees(results(after, state, batch), results(before, state, batch))
    return after


def test_a_chain_stays_in_one_place():
    program = both(lambda x: ((x + 1) * 2 - 3).neg().tanh())
    targets = [n.target for n in program.gm.graph.nodes]
    assert targets.count(aten.add.Tensor) == 1  # x is the caller's
    assert len(written(program)) == 4


def test_the_second_operand_may_be_the_one():
    assert len(written(both(lambda x: x / (x + 1)))) == 1


@pytest.mark.parametrize("fn", [
    lambda x: x * 2,  # the batch
    lambda x: (lambda y: y * 2 + y)(x.cos()).sum() + 0,  # y is read later; the product may be written over
    lambda x: x.view(-1, 64) * x.cos().t(),  # lies otherwise than a fresh result would
    lambda x: (lambda y: y[:32] * 2)(x.cos()),  # part of its memory
    lambda x: (lambda y: y[0] + y)(x.cos()),  # another operand looks at the same memory
    lambda x: (x.cos() > 0) * x,  # another dtype
    lambda x: x.cos()[:1] * x,  # another shape
])  # fmt: skip
def test_what_others_need_is_left_alone(fn):
    program = both(fn)
    first = {n.target for n in written(program)}
    assert first <= {aten.mul.Tensor}, first


def test_memory_a_view_will_read_is_left_alone():
    def fn(x):
        y = x.cos()
        row = y[3]
        return (y + 1).sum() + row.sum()

    assert not written(both(fn))


def test_what_came_by_reuse_is_followed():
    def fn(x):
        y = x.cos()
        z = y + 1  # in y's memory
        row = z[3]
        return (z * 2).sum() + row.sum()  # not in z's: row reads it

    assert [n.target for n in written(both(fn))] == [aten.cos.default]


def test_a_whole_step_keeps_its_bits():
    module = torch.nn.Sequential(
        torch.nn.Linear(16, 300), torch.nn.SiLU(), torch.nn.Linear(300, 300), torch.nn.GELU(), torch.nn.Linear(300, 1)
    )
    batch = {"x": torch.randn(32, 16)}
    step = step_with(lambda p, b: functional_call(module, p, (b["x"],)).square().mean())

    state = state_of(module, 3)
    before = captured(step, state, batch)
    after = captured(step, state, batch, *SCHEDULE)
    assert len(written(after)) > 4
    assert_same_trees(results(after, state, batch), results(before, state, batch))
