"""Plans of replicas that train apart, and of optimizers whose steps are of several kinds."""

import dataclasses

import pytest
import torch

import zerofn
from tests.planning.test_wire import HERE, WIDTH, build, init, loss
from tests.support.small_steps import step_with
from zerofn import optim
from zerofn.planning.rounds import Rounds, TimedRounds

ROWS = torch.zeros(64, WIDTH)
PARAMS, COUNT = 4 * WIDTH**2, 8  # bytes of the outer optimizer's count of updates
GRID = {"replicate": 2, "data": 4}
PLAN = {"machine": HERE, "stage": 3, "offload": None, "precision": None, "remat": None, "unit": lambda name: name}


def planned(step, begin=init, **options):
    return zerofn.plan(step, begin, ROWS, **(PLAN | options))


def rounds_of(**options):
    return zerofn.diloco(step_with(loss), **{"every": 10, **options})


def timed(inner=1.0, rate=1.0, **of):
    usual = {"every": 10, "fragments": 1, "tau": 0, "axis": "replicate", "replicas": 2, "inner": {}, "between": 8}
    return TimedRounds(Rounds(**(usual | of)), inner, rate, "computing", 0)


@pytest.mark.parametrize(
    ("of", "waits"),
    [
        ({"tau": 0}, 8.0),
        ({"tau": 0, "fragments": 4}, 8.0),
        ({"tau": 1}, 3.0 + 4.0),  # sums take 4 s, of which a step hides 1
        ({"tau": 1, "fragments": 4}, 4 * (0.0 + 1.0)),
        ({"tau": 2, "fragments": 4}, 0.0),
        ({"tau": 5}, 1.0 + 2.0),
        ({"tau": 8}, 0.0),
    ],
    ids=str,
)
def test_what_inner_steps_wait_for(of, waits):
    found = timed(**of)
    assert found.waits == pytest.approx(waits)
    assert found.seconds == pytest.approx(1.0 + waits / 10)
    assert found.least_every == 8


def test_a_link_that_carries_less_than_is_sent_bounds_the_run():
    slow = timed(rate=0.1, tau=9, fragments=10)
    assert slow.seconds == pytest.approx(8.0) and slow.bound == "sent along replicate" and slow.least_every == 80


def test_the_row_of_rounds_has_the_inner_step_and_what_the_outer_optimizer_has_beside_it():
    row = planned(rounds_of(), mesh=GRID)[0]
    inner = planned(step_with(loss), mesh={"data": 4})[0]
    shard = 4 * PARAMS // 4
    beside = 3 * shard + COUNT  # outer parameters, momentum, differences
    assert row.needs.device - inner.needs.device == row.peak["state"] - inner.plan.memory().peak["state"] == beside
    sums_and_means = 2 * shard // 2
    assert row.rounds.of == Rounds(10, 1, 1, "replicate", 2, inner.plan.sent_along, sums_and_means)
    assert row.sent == {**inner.plan.sent_along, "replicate": sums_and_means // 10}
    assert row.rounds.inner == inner.seconds and row.rounds.rate == HERE.network
    assert row.speed == pytest.approx(2 * inner.speed * inner.seconds / row.seconds)


def test_from_the_least_number_of_inner_steps_on_the_link_does_not_bound():
    far = dataclasses.replace(HERE, network=1e6)
    least = planned(rounds_of(tau=0), mesh=GRID, machine=far)[0].rounds.least_every
    assert least > 100
    for every, bounds in ((least, False), (least // 3, True)):
        row = planned(rounds_of(every=every, tau=every - 1, fragments=4), mesh=GRID, machine=far)[0]
        assert (row.seconds > 2 * row.rounds.inner) == (row.bound == "sent along replicate") == bounds


def test_the_steps_that_all_ranks_take_together_are_planned_too():
    row = planned(rounds_of(after=100), mesh=GRID)[0]
    (together,) = row.others
    plain = planned(step_with(loss), mesh=GRID)[0]
    assert together.row.sent == plain.sent and together.row.seconds == plain.seconds
    assert (together.number, together.until) == (100, 100)


def test_a_table_says_what_rounds_do_and_what_to_write():
    table = planned(rounds_of(after=100, wire="int8"), mesh=GRID)
    text = table.text(wide=True)
    assert "replicas meet every 10 steps: an inner step takes" in text
    assert (
        "along replicate in a round; a step takes" in text and "the link between replicas is not the bottleneck" in text
    )
    assert "together, the first 100 steps: " in text
    assert "state = step.init(zerofn.shard(init_state, stage=3, mesh=zerofn.Mesh.make(replicate=2, data=4)))" in text
    (row,) = table.json()["rows"]
    assert row["rounds"]["least_every"] == table[0].rounds.least_every
    assert row["others"][0]["row"]["plan"]["sent"] == table[0].others[0].row.sent


def test_a_memory_budget_leaves_room_for_the_outer_optimizer():
    row = planned(rounds_of(), mesh=GRID, remat="budget", memory=32_000_000)[0]
    assert row.config.memory == 32_000_000 - 3 * PARAMS - COUNT
    assert f"memory={32_000_000 - 3 * PARAMS - COUNT}" in row.config.call()


@pytest.mark.parametrize(
    ("mesh", "sentence"),
    [({"data": 4}, "axis='replicate' must be the mesh axis along which"), ("auto", "does not support zerofn.diloco")],
    ids=str,
)
def test_a_mesh_without_replicas_is_told(mesh, sentence):
    step = rounds_of()
    with pytest.raises(ValueError, match=sentence):
        planned((lambda _: (step, None)) if mesh == "auto" else step, mesh=mesh, world=4)


def with_signs(tx):
    return lambda: zerofn.TrainState.create(params=dict(build().named_parameters()), tx=tx)


def test_signs_are_planned_and_the_exact_steps_before_them():
    row = planned(step_with(loss), with_signs(optim.onebit_adam(1e-3, freeze_step=1000)), world=4)[0]
    (exact,) = row.others
    plain = planned(step_with(loss), world=4)[0]
    gathers = plain.plan.sent // 3 * 2  # for the forward and the backward pass; what is reduced is as large
    assert row.plan.sent - gathers < (plain.plan.sent - gathers) / 24
    assert exact.row.plan.sent == plain.plan.sent
    assert (exact.name, exact.number, exact.until) == ("exact", 1000, 1000)
    assert row.needs.device >= exact.row.needs.device
    assert "exact, the first 1,000 steps: " in "\n".join(row.details())


def test_exact_steps_among_others_are_counted():
    row = planned(step_with(loss), with_signs(optim.zero_one_adam(1e-3, var_freeze_step=20, var_update_scaler=2)))[0]
    assert str(row.others[0]).startswith("exact, 7 of the first 20 steps: ")


def test_another_optimizer_has_one_kind_of_steps():
    assert planned(step_with(loss), world=4)[0].others == ()


def lowered_and_sent():
    """Of replicas on two ranks: what a plan for them says, and `step.lower` before and behind the first step."""
    mesh = zerofn.Mesh.make(replicate=2)
    step = rounds_of(every=2, after=1)
    compiled, state = zerofn.compile(step), step.init(zerofn.shard(init, mesh=mesh, unit=lambda name: name))
    row, first = planned(step, mesh={"replicate": 2})[0], compiled.lower(state, ROWS)
    state, _ = compiled(state, ROWS)
    later = compiled.lower(state, ROWS)
    assert row.rounds.of == first.rounds == later.rounds
    assert row.sent == later.average == {"replicate": later.between // 2}
    assert row.others[0].row.sent == first.together.sent_along and later.together is None
    assert "the first 1 steps, of all ranks together" in first.text()


def test_a_plan_for_a_cluster_is_that_of_the_ranks_there(ranks):
    ranks(2, lowered_and_sent)
