import dataclasses

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    aten,
    batch_of,
    build,
    fake_ranks,
    gathers,
    loss_of,
    ops,
    scheduled,
    state_of,
    train_step_of,
)
from zerofn import optim, tree
from zerofn.graph.alias import positions, writes
from zerofn.graph.node_kinds import wait_of


def pointers(value):
    return [x.data_ptr() for x in tree.leaves(value)]


def moved_sgd(module, lr=0.1):
    """Plain descent, as a user writes it."""
    loss_fn = loss_of(module)

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        params = tree.tree_map(lambda p, g: p - lr * g, state.params, grads)
        return state.replace(params=params, step=state.step + 1), loss

    return step


@pytest.mark.part(stage=[0, 3])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("make", [train_step_of, moved_sgd])
def test_the_new_state_has_the_old_ones_memory(make, stage):
    module = build()
    step, state = make(module), state_of(module, stage)
    eager, _ = step(state_of(module, stage), batch_of())
    before = pointers((state.params, state.opt_state[1], state.opt_state[2]))
    new, _ = zerofn.compile(step)(state, batch_of())
    assert pointers((new.params, new.opt_state[1], new.opt_state[2])) == before
    assert_same_trees(new, eager)


def test_a_rule_of_ours_is_run_in_place_and_nothing_is_copied():
    module = build()
    program = scheduled(train_step_of(module), state_of(module, 3), batch_of(), donating=True)
    targets = [n.target for n in program.gm.graph.nodes]
    assert targets.count(ops.adamw_.default) == 4
    assert ops.adamw.default not in targets and aten.copy_.default not in targets


def three_steps(step, make_state, compiled):
    run = zerofn.compile(step) if compiled else step
    rank = dist.get_rank() if dist.is_initialized() else 0
    state, out = make_state(), []
    for k in range(3):
        state, aux = run(state, batch_of(rank, seed=k))
        out.append(aux)
    return [x.clone() for x in tree.leaves((zerofn.unshard(state), out))]


def assert_as_eager(step, make_state):
    ours, theirs = (three_steps(step, make_state, compiled) for compiled in (True, False))
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("stage", [0, 3])
def test_two_entries_that_change_places(stage):
    module = build()

    def swap(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return dataclasses.replace(new, params=new.extra, extra=new.params), aux

    def make_state():
        return state_of(module, stage, extra={k: 2 * p.detach() for k, p in module.named_parameters()})

    assert_as_eager(swap, make_state)


def test_plain_entries_that_change_places_and_one_that_stays():
    def rotate(state, batch):
        a, b, c = state["params"]["a"], state["b"], state["c"]
        new = {"params": {"a": b}, "b": c, "c": a, "kept": state["kept"], "n": state["n"] + 1}
        return new, a.sum() + batch["x"][0, 0]

    def make_state():
        values = torch.arange(64.0).view(4, 16)
        return {
            "params": {"a": values[0].clone()},
            "b": values[1].clone(),
            "c": values[2].clone(),
            "kept": values[3].clone(),
            "n": 0,
        }

    run, state = zerofn.compile(rotate), make_state()
    kept = state["kept"].data_ptr()
    for k in range(1, 5):
        state, _ = run(state, batch_of())
        rows = [state["params"]["a"], state["b"], state["c"]]
        assert [int(r[0]) // 16 for r in rows] == [(k + j) % 3 for j in range(3)]
        assert state["kept"].data_ptr() == kept and torch.equal(state["kept"], torch.arange(48.0, 64.0))
        assert state["n"].item() == k


def aux_is_state(module):
    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        full = zerofn.gather(state.params)
        return new, {**aux, "old": full["0.weight"], "shards": state.params, "new": new.params, "moment": new.opt_state}

    return step


def aux_reads_late(module):
    """Something reads the old parameters after the update."""

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        moved = tree.tree_map(lambda a, b: a - b, new.params, state.params)
        return new, {**aux, "moved": zerofn.global_norm(moved)}

    return step


def aux_gathers_late(module):
    """The old parameters are read after the update in their gathered form alone."""

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return new, {**aux, "before": zerofn.gather(state.params)["3.weight"] * 1}

    return step


def same_value_twice(module):
    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return dataclasses.replace(new, extra=new.params), {**aux, "step": new.step}

    return step


def results_on_donated_memory(make, precision, stages):
    module = build()
    for stage in stages:

        def make_state(stage=stage):
            extra = {k: torch.zeros_like(p) for k, p in module.named_parameters()}
            return state_of(module, stage, extra=extra, precision=precision)

        assert_as_eager(make(module), make_state)


@pytest.mark.part(precision=["bf16"], make=[aux_gathers_late])
@pytest.mark.parametrize("make", [aux_is_state, aux_reads_late, aux_gathers_late, same_value_twice])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_results_that_stand_on_donated_memory_keep_their_values(ranks, make, precision):
    results_on_donated_memory(make, precision, [3])
    ranks(2, results_on_donated_memory, make, precision, [1, 2])  # where a gathered copy is donated with the shards


@pytest.mark.parametrize("stage", [0, 3])
def test_an_average_of_the_parameters(stage):
    module = build()

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        average = tree.tree_map(lambda a, b: 0.9 * a + 0.1 * b, state.extra, new.params)
        return dataclasses.replace(new, extra=average), aux

    assert_as_eager(step, lambda: state_of(module, stage, extra={k: p.detach() for k, p in module.named_parameters()}))


def test_an_entry_that_grows_is_returned_anew():
    module = build()

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return dataclasses.replace(new, extra=torch.cat([state.extra, batch["x"][:, 0]])), aux

    run, state = zerofn.compile(step), state_of(module, 3, extra=torch.zeros(16))
    for k in range(1, 3):
        state, _ = run(state, batch_of(seed=k))
        assert state.extra.shape == (16 + 4 * k,) and torch.equal(state.extra[-4:], batch_of(seed=k)["x"][:, 0])


def test_entries_that_share_memory_are_parted():
    def step(state, batch):
        return {"params": {"w": state["params"]["w"] + 1}, "average": state["average"] * 0.5}, batch["x"].sum()

    w = torch.ones(16)
    state = {"params": {"w": w}, "average": w}
    run = zerofn.compile(step)
    for k in range(2):
        state, _ = run(state, batch_of())
        assert torch.equal(state["params"]["w"], torch.full((16,), 2.0 + k))
        assert torch.equal(state["average"], torch.full((16,), 0.5 / (k + 1)))


def test_no_piece_is_updated_while_it_is_sent():
    """The old parameters are gathered again after the update; that gather starts before it."""
    module = build(4)

    def step(state, batch):
        new, aux = train_step_of(module)(state, batch)
        return new, {**aux, "before": loss_of(module)(zerofn.gather(state.params), batch)}

    with fake_ranks(2):
        gm = scheduled(step, state_of(module, 3), batch_of(), donating=True).gm
    where = positions(gm.graph)
    sent = [(g.args[0], where[g], where[wait_of(g)]) for g in gathers(gm)]
    updates = [n for n in gm.graph.nodes if n.target in (ops.adamw_.default, aten.copy_.default)]
    assert len(sent) > 4 and sum(writes(n)[0] in {shard for shard, *_ in sent} for n in updates) == 4
    for node in updates:
        assert not any(shard in writes(node) and where[node] < stop for shard, _, stop in sent)


def test_a_rule_that_reads_what_it_would_write_is_not_run_in_place():
    module = build(2)
    program = scheduled(
        lambda s, b: (s.apply_gradients(s.params), None),
        state_of(module, 3, tx=optim.lion(0.1)),
        batch_of(),
        donating=True,
    )
    targets = [n.target for n in program.gm.graph.nodes]
    assert targets.count(ops.lion.default) == 2 and ops.lion_.default not in targets
