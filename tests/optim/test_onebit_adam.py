"""1-bit Adam beside plain torch in float64, which simulates its workers and its server after the paper."""

import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support import onebit_by_torch
from tests.support.same import assert_same_trees
from zerofn import optim

RATE, DECAY, FREEZE, STEPS = 0.01, 0.1, 3, 9


def model(dtype=torch.float32):
    """Odd sizes: leaves that cross the edges of shards, and a unit of less than a block."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(23, 131), nn.GELU(), nn.Linear(131, 7), nn.Tanh(), nn.Linear(7, 23)).to(dtype)


def unit_of(name):
    return name.split(".")[0]


def rows(rank, step):
    return torch.randn(8, 23, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(net, params, x):
    return (functional_call(net, params, (x,)) - x).square().mean()


def onebit(**options):
    return optim.onebit_adam(RATE, weight_decay=DECAY, **{"freeze_step": FREEZE, **options})


def started(stage, tx=None, num_microbatches=1, **options):
    """(state, step)"""
    net = model()

    def step(state, x):
        vg = state.value_and_grad(functools.partial(loss_of, net))
        loss, grads = (vg if num_microbatches == 1 else zerofn.accumulate(vg, num_microbatches))(x)
        return state.apply_gradients(grads), loss

    create = {k: options.pop(k) for k in ("frozen", "loss_scale") if k in options}
    init = zerofn.TrainState.create(params=dict(net.named_parameters()), tx=tx or onebit(), **create)
    return zerofn.shard(init, stage=stage, unit=unit_of, **options), step


def trained(state, step, first=0, steps=STEPS, batch=rows):
    """(losses, the state)"""
    losses = []
    for k in range(first, steps):
        state, loss = step(state, batch(zerofn.rank(), k))
        losses.append(loss)
    return losses, state


def by_torch(size, steps=STEPS, **options):
    """The same in float64: (losses, parameters)."""

    def gradients(net, k):
        found = []
        for rank in range(size):
            loss = (net(rows(rank, k).double()) - rows(rank, k).double()).square().mean()
            found.append((loss.detach(), torch.autograd.grad(loss, list(net.parameters()))))
        return found

    def optimizer(place):
        given = {"rate": RATE, "decay": DECAY, "freeze_step": FREEZE, **options}
        return onebit_by_torch.OneBitAdam(place, size, **given)

    layout = started(3)[0].params.layout
    return onebit_by_torch.trained(model(torch.float64), layout, optimizer, gradients, steps)[:2]


def every_stage():
    size = zerofn.world_size()
    losses, params = by_torch(size)
    reference = None
    for stage in range(4):
        for captured in (True, False):
            state, step = started(stage)
            found, state = trained(state, zerofn.compile(step) if captured else step)
            now = {
                "losses": torch.stack(found),
                "state": zerofn.unshard(state.opt_state),
                **zerofn.unshard(state.params),
            }
            reference = reference or now
            assert_same_trees(now, reference, f"stage {stage}, {'captured' if captured else 'as written'}")
    assert torch.allclose(reference.pop("losses").double(), torch.stack(losses), rtol=1e-5)
    reference.pop("state")
    for name, x in reference.items():
        assert torch.allclose(x.double(), params[name], atol=1e-5, rtol=1e-4), name


@pytest.mark.part(size=[2])
@pytest.mark.part(size=[3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_stage_has_the_bits_of_stage_0_and_the_values_of_the_paper(ranks, size):
    ranks(size, every_stage)


def warm_up():
    """Until its freeze step it is `adamw`."""
    for stage in range(4):
        both = [started(stage, tx) for tx in (onebit(freeze_step=STEPS), optim.adamw(RATE, weight_decay=DECAY))]
        found = [trained(state, zerofn.compile(step)) for state, step in both]
        (losses, state), (wanted, other) = found
        assert_same_trees(losses, wanted, f"stage {stage}")
        assert_same_trees(zerofn.unshard(state.params), zerofn.unshard(other.params), f"stage {stage}")


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_before_the_freeze_step_it_has_the_bits_of_adamw(ranks, size):
    ranks(size, warm_up)
