"""Which values of a step differ from rank to rank, and where they may not go."""

import dataclasses

import pytest
import torch

import zerofn
from tests.support.small_steps import WIDTH, batch_of, build, fake_ranks, loss_of, state_of, train_step_of
from zerofn import collectives, tree
from zerofn.capture.capture import CaptureError, capture
from zerofn.capture.checked_capture import captured
from zerofn.capture.verify import check_purity
from zerofn.graph.own_values import own_values

MODULE = build(2)


def step_with(change, extra=None):
    """The everyday step, with `change(grads, state, batch)` before the update."""

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
        new = state.apply_gradients(change(grads, state, batch))
        return (new if extra is None else dataclasses.replace(new, extra=extra(state, batch))), loss

    return step


def scaled(grads, n):
    return tree.tree_map(lambda g: g / n, grads)


def in_place(grads, n):
    return tree.tree_map(lambda g: g.clone().div_(n), grads)


def number(value):
    return {**batch_of(), "n": torch.tensor(value)}


REFUSED = {
    "a sum of the batch": (lambda g, s, b: scaled(g, b["x"].sum()), "batch entry 'x'"),
    "in place": (lambda g, s, b: in_place(g, b["x"].sum()), "batch entry 'x'"),
    "two entries": (lambda g, s, b: scaled(g, b["x"].sum() + b["y"].mean()), "batch entry 'x' and batch entry 'y'"),
    "through a buffer": (lambda g, s, b: scaled(g, torch.ones(()).add_(b["x"].amax())), "batch entry 'x'"),
    "a choice": (
        lambda g, s, b: tree.tree_map(lambda x: torch.where(b["x"].sum() > 0, x, 0 * x), g),
        "batch entry 'x'",
    ),
    "its part of a sum": (
        lambda g, s, b: scaled(g, collectives.reduce_scatter(b["x"].flatten()).sum()),
        "part of a reduce_scatter",
    ),
    "what others sent": (
        lambda g, s, b: scaled(g, collectives.all_to_all(torch.ones(2, 3)).sum()),
        "place in all_to_all",
    ),
    "another rank's": (lambda g, s, b: scaled(g, collectives.permute(b["x"].sum(), [1, 0])), "batch entry 'x'"),
}
ALLOWED = {
    "reduced": lambda g, s, b: scaled(g, collectives.all_reduce(b["x"].sum())),
    "gathered": lambda g, s, b: scaled(g, collectives.all_gather(b["x"].sum().view(1)).amax()),
    "declared": lambda g, s, b: scaled(g, zerofn.same(b["x"].sum())),
    "a shape": lambda g, s, b: scaled(g, torch.ones_like(b["x"]).sum() + b["x"].shape[0]),
    "a norm": lambda g, s, b: scaled(g, zerofn.global_norm(g)),
    "the loss": lambda g, s, b: scaled(g, s.value_and_grad(loss_of(MODULE))(b)[0]),
    "the step": lambda g, s, b: scaled(g, s.step + 1),
    "before the scatter": lambda g, s, b: zerofn.scatter(scaled(zerofn.gather(s.params), b["x"].sum()), like=s.params),
}
each_stage = pytest.mark.parametrize("stage", [0, 2, 3])


@pytest.mark.part(stage=[3])
@pytest.mark.part(stage=[0], name=["in place"])
@each_stage
@pytest.mark.parametrize("name", REFUSED)
def test_a_ranks_own_value_may_not_meet_a_shard(name, stage):
    change, origin = REFUSED[name]
    with fake_ranks(2), pytest.raises(CaptureError, match=f"differs from rank to rank.*{origin}") as caught:
        captured(step_with(change), state_of(MODULE, stage), batch_of())
    message = str(caught.value)
    assert f" at {__file__}:" in message and "all_reduce(x)" in message and "zerofn.same(x)" in message


@pytest.mark.part(world=[3], stage=[3])
@pytest.mark.part(world=[2], stage=[2])
@pytest.mark.part(world=[1], stage=[0])
@each_stage
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ALLOWED)
def test_values_that_are_equal_on_all_ranks_may_meet_the_state(name, world, stage):
    with fake_ranks(world):
        program = capture(step_with(ALLOWED[name]), state_of(MODULE, stage), batch_of(rows=6))
        check_purity(program)
    assert program.warning == ""


@pytest.mark.parametrize("name", [k for k in REFUSED if k not in ("what others sent", "another rank's")])
def test_one_rank_is_warned(name):
    with pytest.warns(UserWarning, match="with more than one rank this step is refused: .* at .*test_own_values.py"):
        captured(step_with(REFUSED[name][0]), state_of(MODULE, 3), batch_of())


@pytest.mark.parametrize("n", [1, 2])
def test_its_own_weight_is_reduced_by_value_and_grad(n):
    def loss_fn(params, batch):
        return loss_of(MODULE)(params, batch) * batch["x"].shape[0], batch["x"].sum().square()

    def step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), n)(batch)
        return state.apply_gradients(grads), loss

    for world in (1, 2):
        with fake_ranks(world):
            program = capture(step, state_of(MODULE, 3), batch_of())
            check_purity(program)
            assert program.warning == ""


@pytest.mark.part(n=[2], stage=[3])
@pytest.mark.part(n=[1], stage=[0])
@each_stage
@pytest.mark.parametrize("n", [1, 2])
def test_aux_is_a_ranks_own(n, stage):
    def loss_fn(params, batch):
        return loss_of(MODULE)(params, batch), batch["x"].sum()

    def step(state, batch):
        (loss, aux), grads = zerofn.accumulate(state.value_and_grad(loss_fn, has_aux=True), n)(batch)
        return state.apply_gradients(scaled(grads, aux.sum())), loss

    with fake_ranks(2), pytest.raises(CaptureError, match="batch entry 'x'"):
        captured(step, state_of(MODULE, stage), batch_of())


def test_a_draw_with_a_ranks_own_key_is_its_own():
    def loss_fn(params, batch):
        return loss_of(MODULE)(params, batch), torch.rand(())

    def step(state, batch):
        (loss, drawn), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)
        return state.apply_gradients(scaled(grads, drawn)), loss

    def for_all(state, batch):
        loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
        with zerofn.random.randomness(state.rng_at()):
            drawn = torch.rand(())
        return state.apply_gradients(scaled(grads, drawn)), loss

    with fake_ranks(2):
        with pytest.raises(CaptureError, match="random key"):
            captured(step, state_of(MODULE, 3), batch_of())
        captured(for_all, state_of(MODULE, 3), batch_of())


def test_a_loop_that_writes_its_own_value_is_followed():
    def step(state, batch):
        seen = torch.zeros(())

        def loss_fn(params, batch):
            seen.add_(batch["x"].sum())
            return loss_of(MODULE)(params, batch)

        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), 2)(batch)
        return state.apply_gradients(scaled(grads, seen)), loss

    with fake_ranks(2), pytest.raises(CaptureError, match="batch entry 'x'"):
        captured(step, state_of(MODULE, 3), batch_of())


def test_a_number_in_the_batch_is_checked_where_it_meets_a_shard_and_only_there():
    def checks(step):
        with fake_ranks(2):
            program, _ = captured(step, state_of(MODULE, 3), number(2.0))
        return [n.args[2] for n in program.gm.graph.nodes if n.target is torch.ops.zerofn.check_same.default]

    assert checks(step_with(lambda g, s, b: scaled(g, b["n"]))) == ["batch entry 'n'"]
    assert checks(step_with(lambda g, s, b: scaled(g, b["n"] * 2 + s.step))) == ["batch entry 'n'"]
    assert checks(train_step_of(MODULE)) == []


def test_a_number_does_not_excuse_what_comes_with_it():
    with fake_ranks(2), pytest.raises(CaptureError, match="own batch entry 'x'"):
        captured(step_with(lambda g, s, b: scaled(g, b["n"] * b["x"].sum())), state_of(MODULE, 3), number(2.0))


def test_a_shard_in_the_batch_is_no_ranks_own():
    def step(state, batch):
        return state.replace(params=tree.tree_map(torch.add, state.params, batch["delta"])), batch["x"].sum()

    with fake_ranks(2):
        state = state_of(MODULE, 3)
        program = capture(step, state, {"x": torch.ones(WIDTH), "delta": state_of(MODULE, 3).params})
        check_purity(program)
        own = own_values(program)
    assert not any(x in own.results for x in program.output.args[0][: program.num_new])
