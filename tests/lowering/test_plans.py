"""What plans, profiles and errors say of regions."""

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

import zerofn
from tests.graph.test_liveness import measured
from tests.lowering.test_regions import MODE, region_of
from tests.support.outlined_steps import step_of, trained
from tests.support.same import assert_same_trees
from zerofn.cost.simulator import COMPUTE, Timeline
from zerofn.graph.liveness import moments
from zerofn.graph.nested import call, calls, graphs_of, is_region
from zerofn.graph.resident import resident
from zerofn.lowering import inductor, regions
from zerofn.runtime import executor

pytestmark = pytest.mark.slow  # Inductor compiles

aten, CALLABLE = torch.ops.aten, executor.callable_of
NBYTES = 4 * 4 * 4
SLOW = zerofn.Machine("slow", "cpu", 1, 1e9, 1e3, {"float32": 1e3}, link=1.0, network=1.0, launch=1e-3, latency=0.0)


def a_region_of_two():
    """A graph of a region that doubles two values, which nothing else needs; it has six operations."""

    def doubled(graph, x, y):
        twice = [graph.call_function(aten.mul.Tensor, (each, 2.0)) for each in (x, y)]
        return [graph.call_function(aten.mul.Tensor, (each, 3.0)) for each in twice]

    graph = Graph()
    x = graph.placeholder("x")
    with MODE:
        x.meta["val"] = torch.zeros(4, 4)
    given = [graph.call_function(aten.add.Tensor, (x, float(k))) for k in range(2)]
    gm = GraphModule({}, graph)
    gm.body = region_of(doubled)
    made = graph.call_function(call, (graph.get_attr("body"), *given))
    graph.output([graph.call_function(operator.getitem, (made, k)) for k in range(2)])
    return gm


def test_a_region_needs_its_inputs_and_its_results_at_once():
    assert max(x.nbytes for x in moments(a_region_of_two(), {})) == 4 * NBYTES


def test_a_region_takes_one_pass_over_its_inputs_and_its_results():
    passes = 2 * 2 + 4  # two sums read and write, the region reads two and writes two
    assert Timeline(a_region_of_two(), SLOW, 1).busy[COMPUTE] == pytest.approx(passes * NBYTES / 1e3)


WAYS = {
    "alone": {},
    "recomputed": {"remat": "full"},
    "bf16": {"precision": "bf16"},
    "microbatches": {"num_microbatches": 2},
}


@pytest.mark.whole
@pytest.mark.part(name=["blocks"], way=["alone"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["blocks", "llama", "gpt2", "t5"])
def test_the_peak_is_at_most_what_was_planned(name, way):
    step, state, rows = step_of(name, backend="inductor", **WAYS[way])
    for _ in range(2):
        state, _ = step(state, rows)
    plan = step.lower(state, rows)
    there = sum(resident(plan.program).device.values())
    found = measured(lambda *args: (*step(*args),), state, rows)
    assert 0 < found <= 1.005 * (plan.memory().total - there)


def test_a_plan_needs_no_compiler(monkeypatch):
    def never(*args):
        raise AssertionError("compiled")

    monkeypatch.setattr(regions, "compiled", never)
    monkeypatch.setattr(inductor, "compiled", never)
    step, state, rows = step_of("blocks", backend="inductor")
    compiled, eager = (x.lower(state, rows) for x in (step, step_of("blocks")[0]))
    assert compiled.memory().total >= eager.memory().total > 0
    assert Timeline(compiled.program.gm, SLOW, 1).seconds < Timeline(eager.program.gm, SLOW, 1).seconds


def test_a_step_is_profiled_as_it_runs():
    step, state, rows = step_of("blocks", backend="inductor")
    (state, loss), found = step.profile(state, rows)
    losses, _ = trained("blocks", backend="inductor")[0]
    assert_same_trees(loss, losses[1])
    assert found.peak <= 1.005 * found.plan.memory().total
    assert "backward" in found.text()


def test_an_error_names_the_line_of_a_region(monkeypatch):
    def compiled(gm):
        def fails(inputs):
            raise RuntimeError("out of memory")

        return regions.Region(fails, [])

    monkeypatch.setattr(inductor, "compiled", compiled)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        trained("blocks", backend="inductor")
    (told,) = [x for x in caught.value.__notes__ if "in step: " in x]
    assert "a region that begins with aten." in told and "outlined_steps.py" in told


def test_an_error_inside_a_region_names_the_line(monkeypatch):
    monkeypatch.setattr(inductor, "missing", lambda gm: "There is no compiler.")

    def fails(*args):
        raise RuntimeError("not there")

    monkeypatch.setattr(
        executor, "callable_of", lambda x, *more: fails if x is aten.native_layer_norm.default else CALLABLE(x, *more)
    )
    with pytest.raises(RuntimeError, match="not there") as caught:
        trained("blocks", backend="inductor")
    (told,) = [x for x in caught.value.__notes__ if "in step: " in x]
    assert "aten.native_layer_norm at " in told and "outlined_steps.py" in told


def test_a_dump_shows_regions(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROFN_DUMP", str(tmp_path))
    step, state, rows = step_of("blocks", backend="inductor", num_microbatches=2)
    gm = step.lower(state, rows).program.gm
    names = [call.name for inner in graphs_of(gm) for _, call in calls(inner) if is_region(call.body)]
    last = sorted(tmp_path.glob("step.*"))[-1].read_text()
    assert names and all(f"# {name}" in last for name in names)
