"""Which units stay gathered through all microbatches: as many as fit, smaller ones first."""

import torch
from torch.func import functional_call

import zerofn
from tests.support.small_steps import fake_ranks
from zerofn import optim
from zerofn.capture.capture import capture
from zerofn.graph.alias import last_uses, positions, roots
from zerofn.graph.nested import graphs_of
from zerofn.graph.node_kinds import argument
from zerofn.passes.budget.hoists import fitting, of_bodies

NARROW, WIDE = 4096 * 4, 3 * 4096 * 4  # bytes of units, whole blocks of two ranks' shards


def program_of(num_microbatches):
    model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Linear(96, 8), torch.nn.Linear(8, 96))

    def train_step(state, batch):
        vg = state.value_and_grad(lambda p, x: functional_call(model, p, (x,)).square().mean())
        loss, grads = zerofn.accumulate(vg, num_microbatches)(batch)
        return state.apply_gradients(grads), loss

    state = zerofn.TrainState.create(params=dict(model.named_parameters()), tx=optim.sgd(0.1))
    return capture(train_step, zerofn.shard(state, stage=3, unit=lambda x: x.split(".")[0]), torch.ones(8, 96))


def test_smaller_units_come_first_and_a_loop_of_one_round_has_none():
    with fake_ranks(2):
        assert not any(of_bodies(program_of(1).gm).values())
        ((body, gathers),) = of_bodies(program_of(2).gm).items()
    assert [argument(x, "unit") for x in gathers] == ["1", "2", "0"]
    assert all(x.graph is body.graph for x in gathers)


def test_as_many_as_fit_beside_what_is_there():
    with fake_ranks(2):
        gm = program_of(2).gm
    ((body, gathers),) = of_bodies(gm).items()
    assert body is graphs_of(gm)[1]
    narrow, other, wide = (x.name for x in gathers)
    empty = [0] * len(body.graph.nodes)
    sizes = [0, NARROW - 1, NARROW, 2 * NARROW, 2 * NARROW + WIDE]
    assert [fitting(body, empty, gathers, limit) for limit in sizes] == [
        [], [], [narrow], [narrow, other], [narrow, other, wide]
    ]  # fmt: skip
    # Where a unit is gathered already, it takes no more.
    where, root = positions(body.graph), roots(body.graph)
    alive = range(where[gathers[2]], last_uses(body.graph, where, root)[root[gathers[2]]] + 1)
    level = [WIDE if k in alive else 0 for k in range(len(empty))]
    assert fitting(body, level, gathers[2:], WIDE) == [wide]
