import contextlib
import gc
import time
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    batch_of,
    build,
    fail_here,
    fake_ranks,
    loss_of,
    ops,
    same,
    scheduled,
    state_of,
    train_step_of,
)
from tests.support.some import some_of
from zerofn import optim, tree
from zerofn.graph.alias import positions
from zerofn.job.in_flight import pending


def with_norm(module):
    def step(state, batch):
        return train_step_of(module)(state, batch)[0], {"norm": zerofn.global_norm(state.params)}

    return step


def norms_and_params(stage, tx, precision):
    module = build()
    state, batch = state_of(module, stage, tx, precision=precision), batch_of(dist.get_rank())
    batch = tree.tree_map(lambda x: x if precision is None else x.bfloat16(), batch)
    step, norms = zerofn.compile(with_norm(module)), []
    for _ in range(3):
        state, aux = step(state, batch)
        norms.append(aux["norm"])
    return norms, zerofn.unshard(state.params)


def same_at_every_stage(rule, precision):
    first, *others = [
        norms_and_params(stage, getattr(optim, rule)(1e-2), precision) for stage in some_of(range(4), 1, 3)
    ]
    for other in others:
        assert_same_trees(other, first, f"{rule}, {precision=}")


@pytest.mark.part(precision=["bf16"], rule=["lamb"])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("rule", ["adamw", "lamb"])
def test_norms_of_what_lies_in_the_copy_wait_for_it(ranks, rule, precision):
    ranks(2, same_at_every_stage, rule, precision)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("donating", [True, False])
def test_each_copy_is_waited_for_just_before_its_first_use(stage, donating):
    module = build()
    with fake_ranks(2):
        program = scheduled(train_step_of(module), state_of(module, stage), batch_of(), donating=donating)
    where, waited = positions(program.gm.graph), []
    for shard, copy, _ in program.copies():
        waits = [n for n in copy.users if n.target is ops.wait.default]
        uses = [n for n in (*copy.users, *shard.users) if n not in waits]
        assert len(waits) == 1 and where[waits[0]] == min(map(where.__getitem__, uses)) - 1
        waited.append(where[waits[0]])
    started = [where[n] for n in program.gm.graph.nodes if n.target is ops.all_gather_into_.default]
    assert len(waited) == 4 and len(started) == (4 if donating else 0)
    assert not started or min(started) > max(waited)


def test_other_stages_wait_for_no_copy():
    module = build()
    for stage in (0, 3):
        with fake_ranks(2):
            program = scheduled(train_step_of(module), state_of(module, stage), batch_of(), donating=True)
        assert not program.copies()


def losses(stage, between):
    """Three steps with `between(state, module)` after each; what it gave, and the parameters in the end."""
    rank, module = dist.get_rank(), build()
    state, step = state_of(module, stage), zerofn.compile(train_step_of(module))
    seen = []
    for k in range(3):
        state, _ = step(state, batch_of(rank, seed=k))
        state, value = between(state, module)
        seen.append(value)
    return [*seen, *tree.leaves(zerofn.unshard(state.params))]


def nothing(state, _):
    return state, torch.zeros(())


def read(state, _):
    return state, torch.stack([x.sum() for x in tree.leaves(zerofn.gather(state.params))]).sum()


def evaluated(state, module):
    def evaluate(state, batch):
        return loss_of(module)(zerofn.gather(state.params), batch)

    return state, zerofn.compile(evaluate)(state, batch_of())


def flattened(state, _):
    return tree.tree_map(lambda x: x, state), torch.zeros(())


def read_part(state, _):
    return state, zerofn.gather(state.params["3"])["3.weight"].sum()


@pytest.mark.part(between=[evaluated])
@pytest.mark.parametrize("between", [nothing, read, evaluated, flattened, read_part])
def test_the_first_use_of_a_copy_between_steps_waits_for_it(ranks, between):
    late = [ranks(2, losses, stage, between) for stage in (1, 2)]
    expected = ranks(2, losses, 3, between)[0]
    assert all(same(run, expected) for per_rank in late for run in per_rank)


def left_under_way():
    """Transfers that are left after each step, a state that was flattened in between, and another step's capture."""
    rank, module = dist.get_rank(), build()
    state, step = state_of(module, 2), zerofn.compile(train_step_of(module))
    counts = []
    for k in range(3):
        state, _ = step(state, batch_of(rank, seed=k))
        counts.append(len(pending().transfers))
        state = tree.tree_map(lambda x: x, state)
    state, _ = step(state, batch_of(rank))
    del state
    gc.collect()
    other, _ = zerofn.compile(train_step_of(module))(state_of(module, 3), batch_of(rank))
    return [*counts, len(pending().transfers)]


def test_nothing_piles_up(ranks):
    assert ranks(2, left_under_way) == [[4, 4, 4, 0]] * 2


def dropped():
    """Transfers that are there after states with copies under way were dropped, and another one is made."""
    rank, module = dist.get_rank(), build()
    step = zerofn.compile(train_step_of(module))
    for k in range(3):
        step(state_of(module, 2), batch_of(rank, seed=k))
    return len(pending().transfers)


def test_what_dropped_states_left_does_not_pile_up(ranks):
    assert ranks(2, dropped) == [4, 4]  # of the last


@contextlib.contextmanager
def slow_posts():
    """On the second rank: what a step leaves under way takes its time."""
    post = pending().post

    def slowly(task):
        def later():
            time.sleep(0.05)
            return task()

        return post(later)

    pending().post = slowly if dist.get_rank() == 1 else post
    try:
        yield
    finally:
        pending().post = post


def copied():
    rank, module = dist.get_rank(), build()
    state, step = state_of(module, 2), zerofn.compile(train_step_of(module))
    state, _ = step(state, batch_of(rank))
    with slow_posts():
        state, _ = step(state, batch_of(rank))
        twin = deepcopy(state.params)
        mine, theirs = (zerofn.gather(x) for x in (twin, state.params))
    assert_same_trees(mine, theirs)


def test_a_copy_of_a_state_that_is_still_arriving(ranks):
    ranks(2, copied)


def cut_off():
    """One state is arriving when another one's step fails: its copies never come, and nobody takes them for whole."""
    rank, module = dist.get_rank(), build()
    state, step = state_of(module, 2), zerofn.compile(train_step_of(module))
    other, expected = state_of(module, 3), step(state_of(module, 2), batch_of(rank))[0].params.shards
    failing = zerofn.compile(lambda s, b: train_step_of(module)(s, {**b, "x": fail_here(b["x"], torch.ones(()))}))
    with slow_posts():
        state, _ = step(state, batch_of(rank))
        with pytest.raises((RuntimeError, ValueError)):
            failing(other, batch_of(rank))
        assert state.params.full is None
    assert_same_trees(list(state.params.shards), list(expected), "its own shards")
    return "told"


def test_copies_that_a_failure_cut_off_are_not_used(ranks):
    try:
        assert ranks(2, cut_off) == ["told", "told"]
    finally:
        ranks.stop()  # their group is gone
