"""What a plan says of coded transfers, beside plans of the same step on slower and faster links."""

import dataclasses
import re

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.small_steps import step_with
from zerofn import optim
from zerofn.comm.mesh import Mesh

HERE = zerofn.Machine("here", "cpu", 4, 8e9, 1e10, {"float32": 1e12}, link=1e9, network=1e8, host_memory=32e9,
                      host_rate=4e10)  # fmt: skip
WIDTH = 512


def build():
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
    return torch.nn.Sequential(*layers)


MODULE = build()


def init():
    return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=optim.adamw(1e-3))


def loss(params, batch):
    return functional_call(MODULE, params, (batch,)).square().mean()


def planned(machine=HERE, stage=3, world=2, **options):
    options = {"offload": None, "precision": None, "remat": None, **options}
    rows = torch.zeros(64, WIDTH)
    table = zerofn.plan(step_with(loss), init, rows, machine=machine, stage=stage, world=world,
                        unit=lambda name: name, **options)  # fmt: skip
    return table[0].plan


def seconds(wire, rate, far=False, **options):
    machine = dataclasses.replace(HERE, **{"network" if far else "link": rate})
    return planned(machine, wire=wire, **options).timeline().seconds


@pytest.mark.part(stage=[1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_slow_links_it_gains_what_is_not_sent(stage):
    found = planned(stage=stage).break_even
    plain, coded = (planned(stage=stage, wire=x).sent for x in (None, "int8"))
    assert found.most == pytest.approx(plain / coded, rel=0.01) and not found.far


def test_rates_are_those_at_which_plans_gain():
    found, gain = planned().break_even, lambda rate: seconds(None, rate) / seconds("int8", rate)
    assert gain(found.none / 1.5) > 1.02 > gain(found.none * 1.5)  # schedules differ a little, too
    assert gain(found.full / 1.5) > found.most**0.9 > gain(found.full * 8)
    assert found.here == pytest.approx(gain(HERE.link), rel=0.01)


def test_a_step_with_codes_is_compared_with_one_without():
    plain, coded = planned().break_even, planned(wire="int8").break_even
    assert coded.form == plain.form == "int8"
    assert coded.here == pytest.approx(plain.here, rel=0.01) and coded.none == pytest.approx(plain.none, rel=0.2)
    both = planned(wire=zerofn.Wire(gather="int4", reduce="fp8")).break_even
    assert both.form == "int4 and fp8" and both.most > coded.most


@pytest.mark.whole
def test_between_nodes_it_is_their_links():
    found = planned(world=8).break_even
    gain = lambda rate: seconds(None, rate, True, world=8) / seconds("int8", rate, True, world=8)  # noqa: E731
    assert found.far and gain(found.full / 1.5) > found.most**0.9 > gain(found.full * 8)
    assert found.none == float("inf") and gain(1e14) > 1.02  # links within nodes bound the step then
    assert str(found).startswith("int8 on the wire: steps 4 times as fast on links between nodes below ")
    assert "no gain" not in str(found)
    fast = dataclasses.replace(HERE, link=1e13)
    assert ", no gain above " in str(planned(fast, world=8).break_even)


def test_it_is_a_line_under_every_plan():
    options = {"machine": HERE, "stage": 3, "offload": None, "remat": None, "unit": lambda name: name}
    table = zerofn.plan(step_with(loss), init, torch.zeros(64, WIDTH), world=2, **options)
    line = (
        r"int8 on the wire: steps 4 times as fast on links below [\d.]+ .?bit/s, no gain above [\d.]+ .?bit/s; [\d.]+"
    )
    for text in (table.text(wide=True), table.plan.text()):
        assert len(re.findall(line, text)) == 1, text
    assert table.json()["wire"]["form"] == "int8"
    alone = zerofn.plan(step_with(loss), init, torch.zeros(64, WIDTH), world=1, **options)
    assert alone.plan.break_even is None and "on the wire" not in alone.text()


def test_bytes_that_no_codec_makes_fewer_gain_nothing():
    module, double = build().double(), torch.zeros(64, WIDTH, dtype=torch.float64)
    state = lambda: zerofn.TrainState.create(params=dict(module.named_parameters()), tx=optim.adamw(1e-3))  # noqa: E731
    step = step_with(lambda params, batch: functional_call(module, params, (batch,)).square().mean())
    found = zerofn.plan(step, state, double, machine=HERE, stage=3, world=2, offload=None, remat=None).plan.break_even
    assert str(found) == "int8 on the wire: no gain on links, at any rate"


def test_a_stage_of_a_pipeline_says_nothing():
    mesh, one = Mesh.planned({"pipe": 2, "data": 2}), torch.zeros(1, WIDTH)
    cuts = zerofn.parallel.pipe(MODULE, mesh, loss, one, schedule="1f1b", microbatches=4)
    plan = zerofn.plan(step_with(loss, 4), init, torch.zeros(64, WIDTH), mesh=mesh, cuts=cuts, machine=HERE, stage=3,
                       offload=None, remat=None).plan  # fmt: skip
    assert plan.break_even is None


def test_what_codes_leave_out_is_planned():
    """4 bytes a parameter, and as many while a step does not know whether it is skipped."""
    plain, fed_back = (planned(wire=zerofn.Wire(reduce="int8", feedback=x)).memory() for x in (False, True))
    own = 4 * 4 * WIDTH**2
    assert fed_back.peak["state"] - plain.peak["state"] == own and 0.9 * own < fed_back.total - plain.total < 2.1 * own
