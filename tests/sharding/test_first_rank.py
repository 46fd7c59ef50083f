"""Ranks that bring other seeds, values or numbers to `shard`: the first rank's draws and values count, and another
computation is refused.
"""

import logging
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.sharding.test_shard import same
from tests.support.same import assert_same_trees
from zerofn import optim
from zerofn.sharding import first_rank

SIZE = 5000  # elements: every rank has a part of a leaf


def seed(rank):
    torch.manual_seed(100 + rank)
    np.random.seed(rank)
    random.seed(rank)


def texts():
    return {x.name: x.state() for x in first_rank.on_host()}


def made(*leaves):
    return zerofn.TrainState.create(params={str(k): x for k, x in enumerate(leaves)}, tx=optim.adamw(1e-3))


def of_all():
    return made(
        torch.randn(SIZE),
        torch.nn.init.orthogonal_(torch.empty(64, 64)),
        torch.tensor([random.random() for _ in range(SIZE)]),
        torch.from_numpy(np.random.randn(SIZE)),
    )


class Messages(logging.Handler):
    def __enter__(self):
        self.found = []
        logging.getLogger("zerofn").addHandler(self)
        return self.found

    def __exit__(self, *_):
        logging.getLogger("zerofn").removeHandler(self)

    def emit(self, record):
        if record.levelno == logging.WARNING:
            self.found.append(record.getMessage())


def drawn_with_other_seeds(stage):
    rank = dist.get_rank()
    seed(0)
    want = of_all().params
    after = texts()
    seed(rank)
    before = texts()
    with Messages() as found:
        state = zerofn.shard(of_all, stage=stage)
    assert_same_trees(zerofn.unshard(state.params), {k: x.detach() for k, x in want.items()}, f"stage {stage}")
    assert texts() == (after if rank == 0 else before), "the first rank's go on, the others' are as they were"
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_rank_draws_as_the_first_one_and_has_its_own_state_back(ranks, stage):
    (told,), *others = ranks(2, drawn_with_other_seeds, stage)
    assert (
        "torch's generator and Python's random generator and numpy.random generator, whose state differs between rank 1"
        in told
    )
    assert others == [[]]


def drawn_with_one_seed():
    seed(7)
    want = made(torch.randn(SIZE)).params
    after = texts()
    seed(7)
    random.seed(dist.get_rank())  # nothing is drawn from it
    with Messages() as found:
        got = zerofn.unshard(zerofn.shard(lambda: made(torch.randn(SIZE))).params)
    assert_same_trees(got, want)
    assert texts()["torch's"] == after["torch's"]
    return found


def test_ranks_with_one_seed_go_on_as_one_process_does_and_hear_nothing(ranks):
    assert ranks(2, drawn_with_one_seed) == [[], []]


def seeded_inside():
    rank = dist.get_rank()

    def build():
        seed(3)
        return of_all()

    want = build().params
    after = texts()
    seed(rank)
    with Messages() as found:
        state = zerofn.shard(build)
    assert_same_trees(zerofn.unshard(state.params), {k: x.detach() for k, x in want.items()})
    assert texts() == after, "on all ranks, as in plain torch"
    return found


def test_a_build_that_seeds_itself_leaves_generators_where_it_would_and_nothing_is_told(ranks):
    assert ranks(2, seeded_inside) == [[], []]


def refused():
    rank = dist.get_rank()
    own, shared = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(5)
    weight = torch.arange(float(SIZE)) + rank
    sized = lambda: torch.empty(SIZE)  # noqa: E731

    def seeded(number):
        torch.manual_seed(number)
        return made(torch.randn(SIZE))

    def first_draws_more():
        if rank == 0:
            torch.randn(1)
        return made(torch.randn(SIZE))

    cases = {
        r"rank 0: normal_\(params.0 \[5000\] float32, 0.0, 2.0\)\n  rank 1: .*, 0.0, 3.0\)": lambda: made(
            torch.nn.init.normal_(sized(), std=2.0 + rank)
        ),
        r"rank 0: .*of seed 0\n  rank 1: .*of seed 1": lambda: seeded(rank),
        r"rank 0: params.0 .*generator=a generator in the state .* of seed 0": lambda: made(
            torch.randn(SIZE, generator=own)
        ),
        r"rank 0: value .* is given: 0.0, 1.0.*\n  rank 1: .* is given: 1.0, 2.0": lambda: made(weight * 2),
        r"rank 0: rng .*, 0, .*\n  rank 1: rng .*, 1, ": lambda: zerofn.TrainState.create(
            params={"0": torch.zeros(9)}, tx=optim.sgd(0.1), seed=rank
        ),
        r"rank 0: .*randn\(\[1\]": first_draws_more,
    }
    for words, init in cases.items():
        with pytest.raises(RuntimeError, match=rf"shard: ranks 0 and 1 initialise different states[^\0]*{words}"):
            zerofn.shard(init)
    zerofn.shard(lambda: made(torch.randn(SIZE, generator=shared)))  # and they go on
    zerofn.shard(lambda: seeded(3))


def test_what_ranks_compute_differently_is_refused_on_all(ranks):
    ranks(2, refused)


def other_values(stage):
    rank = dist.get_rank()
    seed(rank)
    state = of_all()
    seed(0)
    want = of_all()
    with Messages() as found:
        sharded = zerofn.shard(state, stage=stage)
    same(zerofn.unshard(sharded), want)
    with Messages() as none:
        zerofn.shard(want, stage=stage)
    assert not none
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_of_other_values_is_the_first_ranks_on_all(ranks, stage):
    told = ranks(3, other_values, stage)
    assert [len(x) for x in told] == [1, 0, 0]
    assert told[0][0].startswith(
        "shard: ranks 0 and 1 have different values of 'params.0', 'params.1', 'params.2' and 1 more. All ranks use "
        "the values of rank 0."
    )


def of_two_meshes():
    """Ranks 0 and 1 have one state, ranks 2 and 3 another one."""
    grid = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "data"))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    state = zerofn.shard(lambda: made(torch.randn(SIZE) + rank // 2), mesh=zerofn.Mesh.of(grid["data"]))
    return zerofn.unshard(state.params)["0"]


def test_ranks_of_another_mesh_may_differ(ranks):
    for rank, got in enumerate(ranks(4, of_two_meshes)):
        torch.manual_seed(rank // 2 * 2)
        assert torch.equal(got, torch.randn(SIZE) + rank // 2), rank


def test_a_generators_state_is_set_as_it_was_read():
    seed(3)
    torch.randn(3), random.gauss(0, 1), np.random.randn(3)
    known = first_rank.on_host()
    before = [x.state() for x in known]
    want = torch.randn(5), [random.gauss(0, 1) for _ in range(3)], np.random.randn(5)
    for x, state in zip(known, before, strict=True):
        x.restore(state)
    got = torch.randn(5), [random.gauss(0, 1) for _ in range(3)], np.random.randn(5)
    assert torch.equal(want[0], got[0]) and want[1] == got[1] and (want[2] == got[2]).all()
