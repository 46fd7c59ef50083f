"""A step measured, beside what was predicted."""

import json
import time

import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of, train_step_of, unit_of
from zerofn import optim
from zerofn.cost.machine import this_hardware
from zerofn.planning.profile import REST, kind_of

NORMED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
ROWS = 256


def profiled(num_microbatches=1, machine=None, stage=3):
    """(state after it, its profile, the compiled step)."""
    state = state_of(build(6), stage, NORMED)
    step = zerofn.compile(train_step_of(build(6), num_microbatches))
    (state, _), found = step.profile(state, batch_of(rows=ROWS), machine)
    return state, found, step


def here():
    """A machine's profile, of this one."""
    return zerofn.Machine("here", "cpu", 1, 8e9, 1e10, {"float32": 1e10}, link=1e9, network=1e9,
                          measured_on=this_hardware())  # fmt: skip


def test_profiling_trains_two_steps():
    state, _, step = profiled()
    plain = state_of(build(6), 3, NORMED)
    again = zerofn.compile(train_step_of(build(6)))
    for _ in range(2):
        plain, _ = again(plain, batch_of(rows=ROWS))
    assert_same_trees(state, plain)
    state, _ = step(state, batch_of(rows=ROWS))  # as it was, not timed
    plain, _ = again(plain, batch_of(rows=ROWS))
    assert_same_trees(state, plain)


@pytest.mark.part(num_microbatches=[2])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_all_of_a_step_is_accounted_for(num_microbatches):
    before = time.time()
    _, found, _ = profiled(num_microbatches, here())
    assert before <= found.began <= time.time() - sum(seconds for *_, seconds in found.nodes)
    for sums in (found.by_kind(), found.by_unit()):
        measured, predicted = (sum(x) for x in zip(*sums.values(), strict=True))
        assert measured == pytest.approx(sum(seconds for *_, seconds in found.nodes))
        assert measured <= found.seconds
        assert predicted == pytest.approx(found.predicted.seconds, rel=0.01)
    if num_microbatches == 1:
        assert set(found.by_kind()) == {"forward", "backward", REST}
        assert set(found.by_unit()) - {""} == {unit_of(name) for name in dict(build(6).named_parameters())}


def test_memory_is_what_was_predicted():
    _, found, _ = profiled()
    assert found.peak == pytest.approx(found.plan.memory().total, rel=0.01)
    assert found.workspace >= 0
    there = found.plan.memory().there
    by_node = {x.node: x.nbytes for x in found.plan.memory().over_time}
    for (node, *_), held in zip(found.nodes, found.memory, strict=True):
        assert held + there == pytest.approx(by_node[node], rel=0.02), node


def test_a_profile_tells_times_by_unit_and_kind(tmp_path):
    _, found, _ = profiled(machine=here())
    assert "by unit" in found.text() and "predicted" in repr(found)
    slowest = found.by_operation()
    assert 3 < len(slowest) <= 10 and "slowest" in found.text()
    assert [*slowest.values()] == sorted(slowest.values(), key=lambda x: -x.measured)
    assert any(name.startswith("aten.addmm [") and name.endswith("forward") for name in found.by_operation(1000))
    took = found.by_kind()["forward"]
    assert repr(took) == f"{took.measured * 1e3:.2f} ms measured, predicted {took.predicted * 1e3:.2f} ms"
    assert repr(took._replace(predicted=None)) == f"{took.measured * 1e3:.2f} ms measured"
    assert json.loads(json.dumps(found.json()))["peak"] == found.peak
    found.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [x for x in events if x["ph"] == "X"]
    assert {x["pid"] for x in spans} == {0, 1}
    assert len([x for x in spans if x["pid"] == 0]) == len(found.nodes)
    assert any(x["ph"] == "C" for x in events)
    found.picture(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 5000


def waits(stage):
    machine = zerofn.this_machine()
    assert 1.0 <= machine.slowest <= 2.0  # of two ranks one takes no longer than both together
    state, found, _ = profiled(machine=machine, stage=stage)
    units = {kind_of(node): 0 for node, *_ in found.nodes}
    return sorted(units), found.predicted.busy["sent"], found.peak / found.plan.memory().total


def test_several_ranks(ranks):
    for kinds, sent, ratio in ranks(2, waits, 3):
        assert {"waiting", "starting transfers"} <= set(kinds)
        assert sent > 0
        assert ratio == pytest.approx(1, rel=0.01)


def test_an_evaluation_step_leaves_the_state():
    state, module = state_of(build(2), 3), build(2)
    step = zerofn.compile(lambda params, batch: torch.func.functional_call(
        module, zerofn.gather(params), (batch["x"],)).sum())  # fmt: skip
    out, found = step.profile(state.params, batch_of())
    assert torch.equal(out, step(state.params, batch_of()))
    assert found.predicted is None and "predicted" in found.text()
