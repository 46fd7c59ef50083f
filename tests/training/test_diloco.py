"""DiLoCo beside a plain simulation of its replicas in one process, in float64."""

import math
import time

import pytest
import torch

import zerofn
from tests.support.diloco_runs import (
    EVERY,
    RATE,
    STEPS,
    build,
    loss_of,
    mine,
    rows,
    run,
    seen,
    simulated,
    started,
    unit_of,
)
from tests.support.same import assert_same_trees
from zerofn import optim, tree
from zerofn.comm.mesh import Mesh
from zerofn.comm.transport import SentBytes
from zerofn.cost.machine import machine_of
from zerofn.job.in_flight import pending
from zerofn.util.process import the

OF_REPLICAS = ("replicas", "sent")


def trained(sizes, cases):
    mesh, out = Mesh.make(**sizes), []
    for captured, options in cases:
        step, state = started(mesh, **options)
        state, losses = run(mesh, zerofn.compile(step) if captured else step, state)
        out.append((mesh.axis("replicate").rank, torch.stack(losses), *seen(state)))
    return out


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


PLAIN = {"tau": 0}
STREAMING = {"tau": 1, "fragments": 2}
LATE = {"tau": 2, "fragments": 3, "mix": 0.25}
WARM = {"tau": 1, "after": 2}


@pytest.mark.part(sizes=[{"replicate": 2}, {"replicate": 2, "data": 2}])
@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ({"replicate": 2}, [(False, PLAIN), (True, PLAIN), (True, STREAMING), (False, LATE), (True, WARM)]),
        ({"replicate": 2, "data": 2}, [(True, LATE | {"after": 3})]),
        ({"data": 2, "replicate": 2}, [(False, PLAIN), (True, PLAIN | {"stage": 1})]),
    ],
    ids=str,
)
def test_replicas_train_as_a_plain_simulation_of_them(ranks, sizes, cases):
    num_ranks = torch.tensor(list(sizes.values())).prod().item()
    for found in ranks(num_ranks, trained, sizes, cases):
        for (_, options), (replica, losses, anchor, each) in zip(cases, found, strict=True):
            tau, fragments = options["tau"], options.get("fragments", 1)
            mix, after = options.get("mix", 0.5 if tau else 0.0), options.get("after", 0)
            wanted = simulated(2, fragments, tau, mix, after=after)
            close(losses, wanted[0][:, replica])
            close(anchor, wanted[1])
            close(each, wanted[2])


def test_one_replica_steps_from_its_own_differences():
    mesh = Mesh.make(replicate=1)
    step, state = started(mesh, tau=0)
    state, losses = run(mesh, zerofn.compile(step), state)
    wanted = simulated(1)
    close(torch.stack(losses), wanted[0][:, 0])
    close(seen(state)[0], wanted[1])


def restarted(sizes, path, options, at):
    """Losses and states of a run, and of one that is saved after `at` steps and goes on from the checkpoint."""
    mesh = Mesh.make(**sizes)
    step, state = started(mesh, **options)
    compiled = zerofn.compile(step)
    state, before = run(mesh, compiled, state, 0, at)
    zerofn.save(path, state)
    state, after = run(mesh, compiled, state, at)
    fresh, like = started(mesh, **options)
    again = zerofn.load(path, like=like, donate=True)
    again, losses = run(mesh, zerofn.compile(fresh), again, at)
    return torch.stack(after), seen(state), torch.stack(losses), seen(again)


@pytest.mark.part(options=[LATE])
@pytest.mark.parametrize(
    ("options", "at"), [(PLAIN, 4), (LATE, 4), (WARM, 1)], ids=["plain", "late", "before replicas train apart"]
)
def test_a_run_goes_on_bit_for_bit_also_with_differences_on_their_way(ranks, tmp_path, options, at):
    for after, state, losses, again in ranks(2, restarted, {"replicate": 2}, tmp_path / "state", options, at):
        assert torch.equal(after, losses)
        assert_same_trees(again, state)


def gone_on_from_a_copy():
    """Losses and states of a run whose differences are under way, and of a copy of it, one after the other."""
    mesh = Mesh.make(replicate=2)
    step, state = started(mesh, **LATE)
    compiled = zerofn.compile(step)
    state, _ = run(mesh, compiled, state, 0, 4)
    kept = zerofn.copy(state)
    state, after = run(mesh, compiled, state, 4)
    kept, again = run(mesh, compiled, kept, 4)
    return torch.stack(after), seen(state), torch.stack(again), seen(kept)


def test_a_copy_goes_on_with_what_is_under_way(ranks):
    for after, state, losses, again in ranks(2, gone_on_from_a_copy):
        assert torch.equal(after, losses)
        assert_same_trees(again, state)


def of_another_rhythm():
    step = zerofn.diloco(lambda state, batch: (state, None), every=3 + zerofn.rank())
    with pytest.raises(RuntimeError, match="diloco: ranks differ"):
        step.init(plain_state(Mesh.make(replicate=2)))


def test_replicas_of_another_rhythm_are_told(ranks):
    ranks(2, of_another_rhythm)


def with_feedback():
    init = lambda: zerofn.TrainState.create(params={"w": torch.ones(4)}, tx=optim.adamw(RATE))  # noqa: E731
    wire = zerofn.Wire("int8", "int8", smallest=0, feedback=True)
    with pytest.raises(NotImplementedError, match="no place for the error feedback"):
        step_of(every=4).init(zerofn.shard(init, mesh=Mesh.make(replicate=2), wire=wire))


def test_error_feedback_is_told(ranks):
    ranks(2, with_feedback)


def transfers_between_steps(tau):
    """How many transfers go on behind each of the first steps."""
    mesh, found = Mesh.make(replicate=2), []
    step, state = started(mesh, tau=tau)
    compiled = zerofn.compile(step)
    for k in range(EVERY + 2):
        state, _ = compiled(state, mine(mesh, k))
        found.append(len(pending().transfers))
    return found


@pytest.mark.parametrize(("tau", "wanted"), [(0, [0] * 5), (1, [0, 0, 3, 0, 0]), (2, [0, 0, 3, 3, 0])])
def test_differences_travel_while_the_next_inner_steps_run(ranks, tau, wanted):
    assert ranks(2, transfers_between_steps, tau) == [wanted] * 2


def seconds_beside_one_that_is_late(tau):
    """Of the inner step behind the one in which a fragment is sent, while the other replica is a second late."""
    mesh, every = Mesh.make(replicate=2), 5
    step, state = started(mesh, tau=tau, every=every)
    state, _ = run(mesh, compiled := zerofn.compile(step), state, last=2 * every - 1)
    if mesh.axis("replicate").rank == 1:
        time.sleep(1.0)
    state, _ = run(mesh, compiled, state, last=1)
    began = time.monotonic()
    state, _ = run(mesh, compiled, state, last=1)
    took = time.monotonic() - began
    run(mesh, compiled, state, last=4)
    return took


@pytest.mark.parametrize(("tau", "waits"), [(1, True), (4, False)])
def test_a_late_replica_is_waited_for_where_its_differences_are_used(ranks, tau, waits):
    assert (ranks(2, seconds_beside_one_that_is_late, tau)[0] > 0.7) == waits


def saved(sizes, path):
    mesh = Mesh.make(**sizes)
    step, state = started(mesh, tau=1, every=2)
    state, _ = run(mesh, zerofn.compile(step), state, last=2)
    zerofn.save(path, state)
    return whole(state)


def whole(state):
    """All values of a state, as every rank sees them, by name."""
    full = zerofn.unshard(state)
    fields = {k: getattr(full, k) for k in ("step", "params", "opt_state", "replicas", "sent")}
    return {k: dict(zip(tree.field_names(tree.structure(x)), tree.leaves(x), strict=True)) for k, x in fields.items()}


def loaded(sizes, path):
    mesh = Mesh.make(**sizes)
    step, like = started(mesh, tau=1, every=2)
    state = zerofn.load(path, like=like)
    values = whole(state)
    run(mesh, zerofn.compile(step), state, first=2, last=5)  # trains on
    return values


@pytest.mark.part(sizes=[{"replicate": 1, "data": 2}])
@pytest.mark.parametrize("sizes", [{"replicate": 1, "data": 2}, {"replicate": 3}], ids=str)
def test_other_numbers_of_replicas_and_ranks_go_on_from_the_entries_that_there_are(ranks, tmp_path, sizes):
    num_ranks, path = torch.tensor(list(sizes.values())).prod().item(), tmp_path / "state"
    before = ranks(2, saved, {"replicate": 2}, path)
    assert_same_trees(before[0], before[1])
    first, *others = ranks(num_ranks, loaded, sizes, path)
    for other in others:
        assert_same_trees(other, first)
    entries = [r % 2 for r in range(sizes["replicate"])]
    for field, x in before[0].items():
        assert_same_trees(first[field], zerofn.tree_map(lambda x: x[entries], x) if field in OF_REPLICAS else x)


def counted(wire, dtype):
    """(bytes between replicas: planned, sent in a round; what replicas have of the outer parameters)"""
    mesh = Mesh.make(replicate=2)
    step, state = started(mesh, dtype=dtype, tau=1, fragments=2, wire=wire)
    compiled = zerofn.compile(step)
    plan = compiled.lower(state, mine(mesh, 0, dtype))
    state, _ = run(mesh, compiled, state, last=EVERY, dtype=dtype)
    group, sent = mesh.axis("replicate").group, the(SentBytes).by_group
    before = sent[group]
    state, _ = run(mesh, compiled, state, EVERY, 2 * EVERY, dtype=dtype)
    own = [list(x.shards) for x in (state.params, *state.sent)]
    text = plan.text()
    least = plan.least_every(seconds=0.1, rate=1e4), plan.least_every("H100-8", seconds=1e-9)
    assert plan.least_every("H100-8", rate=1e3) > 1
    with pytest.raises(ValueError, match="pass a machine, or both seconds="):
        plan.least_every(rate=1e3)
    return plan.between, plan.sent_along["replicate"], sent[group] - before, least, text, own[0]


@pytest.mark.parametrize("wire", [None, zerofn.Wire(gather="int4", reduce="int8", smallest=0)], ids=str)
def test_a_plan_says_what_replicas_send_and_from_which_number_of_steps_on_the_link_carries_it(ranks, wire):
    found = ranks(2, counted, wire, torch.float32)
    for planned, along, sent, least, text, anchor in found:
        assert planned == along == sent
        assert least == (-(-planned // 1000), math.ceil(planned / machine_of("H100-8").link * 1e9))
        assert "between replicas" in text
        assert_same_trees(anchor, found[0][-1])
    whole = 2 * 3 * 2048 * 4 // 2  # a half of three units twice, in float32
    wanted = whole if wire is None else pytest.approx(whole * 3 / 16, rel=0.03)
    assert found[0][0] == wanted


def test_coded_differences_train_nearly_as_exact_ones(ranks):
    exact, coded = ranks(2, trained_in, None)[0], ranks(2, trained_in, "int8")[0]
    for key, x in exact.items():
        assert not torch.equal(coded[key], x)
        torch.testing.assert_close(coded[key], x, rtol=0.0, atol=2e-2)


def trained_in(wire):
    mesh = Mesh.make(replicate=2)
    wire = zerofn.Wire("int8", "int8", smallest=0) if wire else None
    step, state = started(mesh, dtype=torch.float32, tau=0, wire=wire)
    return seen(run(mesh, zerofn.compile(step), state, dtype=torch.float32)[0])[0]


def evaluated():
    """The loss of the outer parameters, and what a compiled evaluation of them returns on each replica."""
    mesh = Mesh.make(replicate=2)
    step, state = started(mesh, tau=1)
    state, _ = run(mesh, zerofn.compile(step), state, last=EVERY + 1)
    model = build()
    evaluate = zerofn.compile(lambda params, batch: loss_of(model, zerofn.gather(params), batch))
    on_last = zerofn.unshard(state.replicas, rank=1)
    assert (on_last.params is None) == (on_last.step is None) == (zerofn.rank() == 0)
    return evaluate(state.params, rows(0, 0)), {k: x.clone() for k, x in zerofn.gather(state.params).items()}


def test_an_evaluation_sees_the_same_on_all_replicas(ranks):
    (loss, params), other = ranks(2, evaluated)
    assert_same_trees(other, (loss, params))
    close(params, simulated(2, tau=1, mix=0.5, steps=EVERY + 1)[1])


def in_bfloat16(captured):
    """Split masters, a layer that is not trained, a moving average and a number beside the parameters."""
    mesh, model = Mesh.make(replicate=2), build(torch.float32)

    def train_step(state, batch):
        x = {"x": batch["x"].bfloat16(), "y": batch["y"]}
        loss, grads = state.value_and_grad(lambda params: loss_of(model, params, x))()
        extra = {"ema": zerofn.tree_map(lambda a, b: 0.9 * a + 0.1 * b, state.extra["ema"], state.params)}
        return state.apply_gradients(grads, extra=extra | {"n": state.extra["n"] + 1}), loss

    params = dict(model.named_parameters())
    tx, extra = optim.adamw(RATE), {"ema": params, "n": 0}
    state = zerofn.TrainState.create(params=params, tx=tx, extra=extra, frozen=lambda name: name.startswith("2."))
    step = zerofn.diloco(train_step, every=EVERY, tau=1, fragments=2)
    state = step.init(zerofn.shard(state, mesh=mesh, precision="bf16", unit=unit_of))
    state, losses = run(mesh, zerofn.compile(step) if captured else step, state, dtype=torch.float32)
    return losses, whole(state)


def test_masters_frozen_layers_and_what_is_beside_them(ranks):
    (losses, values), (_, others) = ranks(2, in_bfloat16, True)
    (eager, plain), _ = ranks(2, in_bfloat16, False)
    assert_same_trees((losses, values), (eager, plain))
    assert_same_trees(others, values)
    start = dict(build(torch.float32).named_parameters())
    assert torch.equal(values["params"]["2.weight"], start["2.weight"])
    assert not torch.equal(values["params"]["0.weight"], start["0.weight"])
    assert values["replicas"]["extra.n"].tolist() == [STEPS, STEPS]


def draws():
    mesh = Mesh.make(replicate=2)

    def train_step(state, batch):
        loss, grads = state.value_and_grad(lambda p, x: (p["w"] * torch.nn.functional.dropout(x)).sum())(batch)
        return state.apply_gradients(grads), loss

    state = zerofn.shard({"params": {"w": torch.ones(64)}}, mesh=mesh)["params"]
    state = zerofn.TrainState.create(params=state, tx=optim.sgd(0.0), seed=3)
    step = zerofn.diloco(train_step, every=2)
    return step(step.init(state), torch.ones(64))[1]


def test_replicas_draw_apart(ranks):
    one, other = ranks(2, draws)
    assert one != other


def step_of(**options):
    return zerofn.diloco(lambda state, batch: (state, None), **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"every": 0}, "every=0 must be 1 or more inner steps. Write every=100"),
        ({"every": 1}, "with every=1 replicas average after each step, .* tau=1 asks for one. Write tau=0"),
        ({"every": 4, "after": -1}, "after=-1 must be 0 or more: the number of steps at the start of the run"),
        ({"every": 4, "fragments": 5}, "fragments=5 .*Write a number from 1 to 4"),
        ({"every": 4, "tau": 4}, "tau=4 .*Write a number from 0 to 3, or a larger every"),
        ({"every": 4, "mix": 1.0}, "mix=1.0 must be at least 0 and less than 1"),
        ({"every": 4, "tau": 0, "mix": 0.5}, "mix=0.5 has no effect with tau=0"),
        ({"every": 4, "wire": "int3"}, "wire='int3' is not known"),
        (
            {"every": 4, "wire": zerofn.Wire(reduce="int8", rounding="stochastic")},
            "rounding='stochastic' needs the random key of a step",
        ),
        (
            {"every": 4, "wire": zerofn.Wire(reduce="int8", feedback=True)},
            "feedback=True works for gradients, but repl",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_told(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        step_of(**options)


def test_another_optimizer_is_told():
    with pytest.raises(TypeError, match="outer must be a zerofn.optim.GradientTransformation.*optim.sgd"):
        step_of(every=4, outer=torch.optim.SGD)


def plain_state(mesh, **options):
    return zerofn.shard({"params": {"w": torch.ones(4)}}, mesh=mesh, **options)


def test_a_mesh_without_replicas_is_told():
    with pytest.raises(
        ValueError, match=r"axis='replicate' must be the mesh axis along which the replicas lie.*\['data'\]"
    ):
        step_of(every=4).init(plain_state(Mesh.make(data=1)))
    with pytest.raises(ValueError, match="axis='data' must be the mesh axis along which"):
        step_of(every=4, axis="data").init(plain_state(Mesh.make(data=1, replicate=1)))


def test_a_state_that_is_none_is_told():
    step, mesh = step_of(every=4), Mesh.make(replicate=1)
    with pytest.raises(TypeError, match="init expects a state from zerofn.shard"):
        step.init({"params": {"w": torch.ones(4)}})
    with pytest.raises(TypeError, match="Write state = step.init"):
        zerofn.compile(step)(plain_state(mesh), None)
    with pytest.raises(ValueError, match=r"fragments=2, but the parameters have only 1 unit\."):
        step_of(every=4, fragments=2).init(plain_state(mesh))
    state = step.init(plain_state(mesh))
    with pytest.raises(ValueError, match="the state was made with 1 fragment"):
        step_of(every=4, tau=0)(state, None)
    with pytest.raises(ValueError, match="the state has SgdState, from another outer optimizer; .* needs A"):
        step_of(every=4, outer=zerofn.optim.adamw(1e-3))(state, None)


def with_hpz():
    mesh = Mesh.make(replicate=2, data=2)
    with pytest.raises(ValueError, match="spreads one state over all replicas"):
        step_of(every=4).init(plain_state(mesh, hpz=True))


def test_one_state_of_all_replicas_is_told(ranks):
    ranks(4, with_hpz)
