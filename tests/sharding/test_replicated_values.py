"""What several ranks hold of a state."""

import torch

import zerofn
from tests.support.small_steps import fake_ranks
from zerofn import optim, tree
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import equal
from zerofn.sharding.replicated_values import digests, first_unequal, held_alike
from zerofn.sharding.sharded import is_sharded


def held(world, rank, stage, cuts=None, change=lambda state: state, **sizes):
    with fake_ranks(world, rank):
        params = {"a": torch.arange(4096.0), "b": torch.arange(96.0).view(8, 12)}
        mesh = Mesh.make(**sizes)
        state = zerofn.shard(
            zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)), stage=stage, mesh=mesh, cuts=cuts
        )
        paths, leaves, _ = tree.flatten_with_path(change(state), is_leaf=is_sharded)
        found = held_alike([tree.name_of(x) for x in paths], leaves)
        return found, digests(found, mesh)


def names(found):
    return {x.name for x in found if x.name.startswith("params")}


def test_a_rank_shares_what_is_whole_and_what_replicas_have():
    assert names(held(2, 0, 3, data=2)[0]) == set()
    assert names(held(2, 0, 0, data=2)[0]) == names(held(2, 0, 1, replicate=2)[0]) == {"params.a", "params.b"}
    cuts = {"b": equal("tensor", 0, 8, 2)}
    assert names(held(2, 0, 3, cuts, tensor=2)[0]) == {"params.a"}
    assert names(held(4, 0, 0, cuts, data=2, tensor=2)[0]) == {"params.a", "params.b"}


def test_ranks_with_the_same_parts_are_compared():
    one, two = (held(4, rank, 3, data=2, replicate=2)[1] for rank in (0, 1))
    other = held(4, 2, 3, data=2, replicate=2)[1]
    assert one == two and len(set(one) & set(other)) == 1  # the replicated leaves alone


def test_the_first_two_ranks_that_differ_are_found():
    change = lambda state: state.replace(step=state.step + 1)  # noqa: E731
    known = [held(2, rank, 3, change=change if rank else lambda x: x, data=2) for rank in range(2)]
    assert first_unequal("a check", known[0][0], [known[0][1]] * 2) is None
    assert [dict(x[1]).keys() for x in known][0] == dict(known[1][1]).keys() and known[0][1] != known[1][1]
