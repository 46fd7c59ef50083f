"""Stages of a pipeline within a budget: each by its own decisions, with the bits of the step without one."""

from functools import partial

import pytest
import torch
from torch.func import functional_call
from transformers import LlamaConfig, LlamaForCausalLM

import zerofn
from benchmarks.memory.allocations import peaks_of
from benchmarks.mesh.training import on_stages_of
from tests.support.small_steps import step_with
from zerofn import optim, tree
from zerofn.comm.mesh import Mesh
from zerofn.graph.node_kinds import argument, is_gather

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=256, use_cache=False,
)  # fmt: skip
ROWS, LENGTH, MICROBATCHES = 16, 64, 8


def build(layers=4):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": layers}))


class Trained:
    """Some steps of a Llama on this rank's stage."""

    def __init__(self, schedule, stage, layers=4, pipe=-1, **options):
        mesh, model = Mesh.make(pipe=pipe, data=1 if pipe == -1 else -1), zerofn.skeleton(partial(build, layers))

        def init():
            return zerofn.TrainState.create(params=dict(build(layers).named_parameters()), tx=optim.adamw(1e-2))

        def loss_fn(params, ids):
            return functional_call(model, params, kwargs={"input_ids": ids, "labels": ids}).loss

        cuts, unit = on_stages_of(model, mesh, {}, schedule), lambda name: ".".join(name.split(".")[:3])
        self.state = zerofn.shard(init, stage, mesh=mesh, cuts=cuts, unit=unit)
        self.step = zerofn.compile(step_with(loss_fn, MICROBATCHES), **options)
        self.ids = torch.randint(256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
        self.plan = self.step.lower(self.state, self.ids)

    def run(self):
        self.state, self.loss = self.step(self.state, self.ids)

    def params(self):
        return tree.leaves(zerofn.unshard(self.state.params))


def planned_and_measured(schedule, stage, **options):
    """The planned peak, the measured one between operations, and the parameters after four steps."""
    trained = Trained(schedule, stage, **options)
    for _ in range(2):
        trained.run()
    measured = peaks_of(trained.run, [trained.ids])["between"]
    return trained.plan.memory().total, measured, trained.params()


CASES = [("1f1b", 3), ("zb-h1", 1)]


@pytest.mark.whole
@pytest.mark.parametrize(("schedule", "stage"), CASES)
def test_the_peak_of_each_stage_is_the_planned_one(ranks, schedule, stage):
    given = {"free": {}, "full": {"remat": "full"}}
    found = {name: ranks(2, partial(planned_and_measured, schedule, stage, **x)) for name, x in given.items()}
    free, full = ([each[0] for each in found[name]] for name in ("free", "full"))
    assert all(b < a for a, b in zip(free, full, strict=True))
    limit = (max(free) + max(full)) // 2  # which at least one stage keeps by recomputing
    found["within"] = ranks(2, partial(planned_and_measured, schedule, stage, memory=limit))
    assert max(each[0] for each in found["within"]) <= limit
    for results in found.values():
        for (planned, measured, params), (_, _, expected) in zip(results, found["free"], strict=True):
            assert -8192 <= measured - planned <= 0.001 * planned  # pages that no element has touched
            assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


def test_a_budget_below_the_least_is_told_on_every_rank(ranks):
    ranks(2, refused)


def refused():
    with pytest.raises((MemoryError, RuntimeError), match="on this stage of the pipeline. It needs at least"):
        Trained("1f1b", 3, memory=1_000_000)


@pytest.mark.whole
def test_units_that_stay_are_gathered_once(ranks):
    for units, gathered in ranks(4, kept):
        assert len(units) > 4 and gathered == units  # a stage of more units than `reshard` leaves in memory


def kept():
    graph = Trained("1f1b", 3, layers=8, pipe=2, memory="1GB").plan.program.gm.graph
    gathered = [name for n in graph.nodes if is_gather(n) and (name := argument(n, "unit"))]
    return sorted(set(gathered)), sorted(gathered)
