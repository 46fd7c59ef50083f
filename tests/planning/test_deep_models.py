"""What is estimated of a deep model, from two shallow ones, beside the plan of all its layers."""

import json

import pytest

import zerofn
from zerofn.comm.mesh import Mesh
from zerofn.interop.hf_config import step_of
from zerofn.planning.asked import ALL, BUDGET, Initial, Layers, Step
from zerofn.planning.deep_models import Estimator, depths_of, is_deep
from zerofn.planning.plan_row import Config
from zerofn.planning.plan_variants import RowPlanner
from zerofn.planning.wide_table import wide_cells

pytestmark = pytest.mark.slow  # plans of deep models

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 14,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}  # fmt: skip  (large enough that computing hides gathers)
HERE = zerofn.Machine("here", "cpu", 4, 8e9, 1e10, {"float32": 1e10}, link=1e9, network=1e8, host_memory=32e9,
                      host_rate=4e10)  # fmt: skip


def deep_step(tmp_path, mesh):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))

    def step(layers=None):
        found = step_of(path, 128, 2, mesh, layers=layers)
        alike = Layers(found.num_layers, found.odd, step) if layers is None else None
        return Step(found.train_step, found.init_state, found.batch, found.cuts, layers=alike)

    return step()


@pytest.mark.whole
@pytest.mark.parametrize(("sizes", "stage", "remat"), [pytest.param({"data": 4}, 3, None, marks=pytest.mark.whole),
                                                       pytest.param({"data": 4}, 1, None, marks=pytest.mark.whole),
                                                       ({"data": 2, "tensor": 2}, 3, "full")])  # fmt: skip
def test_an_estimate_is_near_the_plan(tmp_path, sizes, stage, remat):
    """Waits and packing differ, and a unit of the last layers may be gathered once less."""
    mesh = Mesh.planned(sizes)
    step, initials = deep_step(tmp_path, mesh), Initial()
    config = Config(stage, None, None, remat, 2, HERE.memory, mesh=tuple(sizes.items()))
    (row,) = Estimator(step, mesh, HERE, "machine", initials).rows(config, remat)
    whole = RowPlanner(step, mesh, HERE, "machine", initials)
    expected = whole.row(config)
    assert row.sent == pytest.approx(expected.sent, rel=0.05) and row.config == expected.config
    assert row.tokens == expected.tokens
    assert row.seconds == pytest.approx(expected.seconds, rel=0.03) and row.bound == expected.bound
    assert row.needs.device == pytest.approx(expected.needs.device, rel=0.4)  # static buffers are a large part here
    assert row.speed == pytest.approx(expected.speed, rel=0.03) and row.plan is None
    assert "~ " in wide_cells(row)[7] and repr(row).startswith(config.label()) and "about" in repr(row)


def test_state_that_is_too_large_is_not_captured(tmp_path):
    """Its bytes are exact: every layer has as many."""
    mesh = Mesh.planned({"data": 4})
    step, initials = deep_step(tmp_path, mesh), Initial()
    config = Config(3, None, None, None, 2, mesh=(("data", 4),))
    needs = RowPlanner(step, mesh, HERE, "machine", initials).of_state(config)
    for more, lacks in ((0, False), (-1, True)):
        small = zerofn.Machine("small", "cpu", 4, needs.device + more, 1e10, {"float32": 1e10}, 1e9, 1e8)
        rows = Estimator(step, mesh, small, "machine", initials).rows(config, ALL)
        first = next(rows)
        assert first.lacks.endswith("for the state alone") == lacks and (first.estimate is None) == lacks
        assert not lacks or first.needs == needs


def test_only_deep_models_are_estimated():
    few = Step(None, None, None, layers=Layers(9, 0, lambda number: None))
    assert depths_of(few.layers) == (3, 6) and not is_deep(few, ALL)
    deep = few._replace(layers=few.layers._replace(number=12))
    assert is_deep(deep, ALL) and is_deep(deep, None) and not is_deep(deep, BUDGET)
    assert not is_deep(deep._replace(layers=deep.layers._replace(odd=2)), ALL)
    assert not is_deep(Step(None, None, None), ALL)
