"""A module whose parameters are in shards, beside one that has its own."""

import copy
import dataclasses
import io
import logging
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofn
from zerofn import optim
from zerofn.integrations.live_module import Live, LiveParameter, is_live, parameters_of
from zerofn.integrations.modules import call_with
from zerofn.job import agreement
from zerofn.job.failures import explained


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.third.weight = self.second.weight
        self.norm = nn.LayerNorm(7)

    def forward(self, x):
        return self.norm(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))


class Owner:
    """What a trainer is here: it has the state."""

    def __init__(self, module, stage=3, precision=None):
        params = parameters_of(module)
        extra = {name: x.clone() for name, x in module.named_buffers()} or None
        first = zerofn.TrainState.create(params=params, tx=optim.sgd(0.1), extra=extra)
        self.state = zerofn.shard(first, stage=stage, precision=precision)
        self.live = Live(module, lambda: self.state, self.take)

    def take(self, state):
        self.state = state


def pair(stage=3, precision=None):
    """A module whose parameters are in shards, its owner, and the same module as it was."""
    torch.manual_seed(0)
    module = Tied()
    plain = copy.deepcopy(module)
    return module, Owner(module, stage, precision), plain


def assert_same(module, plain):
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.detach(), q.detach()), name


def written(module):
    """Every way of writing that people use."""
    nn.init.zeros_(module.norm.bias)
    with torch.no_grad():
        module.first.weight.mul_(2)
        module.first.bias[0] = 7
        torch._foreach_add_([module.second.bias, module.third.bias], 1.0)
        for p in module.norm.parameters():
            p.view(-1)[1:3].fill_(0.25)
    module.second.weight.data.add_(1)
    module.second.bias.data = torch.arange(7.0)
    module.third.bias.detach().numpy()[1] = 3


def there(stage, precision=None):
    """What is read and written, on any number of ranks."""
    module, owner, plain = pair(stage, precision)
    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert module.first.weight.shape == (7, 3) and module.first.weight.device.type == "cpu"
    assert not owner.live._values  # nothing was gathered
    assert torch.equal(module(x), plain(x))
    module(x).sum().backward(), plain(x).sum().backward()
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    for m in (module, plain):
        written(m)
    assert_same(module, plain)
    owner.live.settle()
    assert_same(module, plain)
    full = zerofn.unshard(owner.state.params)
    assert all(torch.equal(full[name], p.detach()) for name, p in plain.named_parameters())
    with owner.live.whole():
        assert type(module.first.weight) is nn.Parameter
        assert_same(module, plain)
        module.first.weight.data.fill_(4)
        owner.live.settle()
        assert (zerofn.unshard(owner.state.params)["first.weight"] == 4).all()
        assert type(module.first.weight) is nn.Parameter
        module.first.weight.data.fill_(5)
    assert (module.first.weight == 5).all() and (zerofn.unshard(owner.state.params)["first.weight"] == 5).all()


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_read_and_written(stage, precision):
    there(stage, precision)


def several(stages):
    for stage in stages:
        there(stage)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("zerofn").addHandler(handler)
    module, owner, _ = pair()
    for _ in range(2):
        assert module.first.weight.norm() > 0
        owner.live.settle()
    logging.getLogger("zerofn").removeHandler(handler)
    return [m for m in messages if "outside the step" in m]


def test_what_is_read_and_written_on_ranks(ranks):
    for said in ranks(2, several, (0, 1, 3)):
        assert len(said) == 1 and said[0].startswith("Tied: 'first.weight' was used outside the step. Its unit,")


def test_a_parameter_stays_the_object_that_others_have():
    module = Tied()
    held, optimizer = list(module.parameters()), torch.optim.SGD(module.parameters(), 0.1)
    owner = Owner(module)
    assert all(a is b for a, b in zip(held, module.parameters(), strict=True))
    assert all(isinstance(p, LiveParameter) for p in optimizer.param_groups[0]["params"])
    assert module.third.weight is module.second.weight
    with torch.no_grad():
        held[0].zero_()
    owner.live.settle()
    assert not zerofn.unshard(owner.state.params)["first.weight"].any()


def test_copies_and_files_are_plain():
    module, _, plain = pair()
    kept = copy.deepcopy(module)
    assert not is_live(kept) and kept.third.weight is kept.second.weight
    assert_same(kept, plain)
    file = io.BytesIO()
    torch.save([module.state_dict(), module], file)
    file.seek(0)
    state, opened = torch.load(file, weights_only=False)
    assert not is_live(opened) and type(state["first.weight"]) is torch.Tensor
    assert_same(opened, plain)
    assert repr(module.norm.bias) == repr(plain.norm.bias) and module.norm.bias.tolist() == [0.0] * 7


def test_a_parameter_has_the_dtype_of_the_state():
    module = Tied().bfloat16()
    before = module.first.weight.detach().clone()
    owner = Owner(module, precision="bf16")  # its master has float32
    assert module.first.weight.dtype == torch.float32 and torch.equal(module.first.weight, before.float())
    with torch.no_grad():
        module.first.weight.add_(1e-4)
    owner.live.settle()
    assert torch.equal(module.first.weight, before.float() + 1e-4)


def test_a_state_dict_is_loaded():
    module, owner, _ = pair()
    other = Tied()
    module.load_state_dict(other.state_dict())
    owner.live.settle()
    assert_same(module, other)


def test_a_parameter_that_is_replaced_gives_its_value():
    module, owner, _ = pair()
    module.first.weight = mine = nn.Parameter(torch.ones(7, 3))
    owner.live.settle()
    assert module.first.weight is mine and isinstance(mine, LiveParameter)
    assert (zerofn.unshard(owner.state.params)["first.weight"] == 1).all()
    module.third.weight = nn.Parameter(torch.ones(7, 7))
    with pytest.raises(
        ValueError, match="'second.weight' is one parameter with several names, and was replaced under one"
    ):
        owner.live.settle()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (nn.Linear(7, 7), "'first.weight' is (7, 3) in the first and (7, 7) in the second."),
        (nn.Linear(3, 7, bias=False), "'first.bias' is (7,) in the first and not there in the second."),
    ],
)
def test_a_state_of_another_model_is_refused(other, told):
    module, owner, _ = pair()
    changed = Tied()
    changed.first = other
    owner.state = zerofn.shard(zerofn.TrainState.create(params=dict(changed.named_parameters()), tx=optim.sgd(0.1)))
    with pytest.raises(ValueError, match="returned two different models") as e:
        Live(Tied(), lambda: owner.state, owner.take)
    assert told in str(e.value) and "copy.deepcopy(config)" in str(e.value)


def test_another_shape_or_dtype_is_refused():
    module, owner, plain = pair()
    module.double()
    assert module.first.weight.dtype == torch.float64 and not is_live(module)
    assert_same(module.float(), plain)
    owner.live.settle()
    assert is_live(module)
    module.first.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"float32 of shape \(7, 3\) in the state, but was replaced by .* \(3, 3\)"):
        owner.live.settle()


def test_another_owner_takes_the_values():
    module, first, plain = pair()
    with torch.no_grad():
        module.first.weight.fill_(3), plain.first.weight.fill_(3)
    second = Owner(module)
    assert_same(module, plain)
    with torch.no_grad():
        module.first.bias.fill_(4)
    second.live.settle()
    first.live.settle()  # and takes the module back
    assert (zerofn.unshard(first.state.params)["first.bias"] == 4).all()
    assert module.first.weight._zerofn[0] is first.live


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused(kind):
    module, _, plain = pair()
    for found in (module, plain):
        with pytest.raises(ValueError, match="Tied: the parameter 'first.weight' has a hook on its gradient"):
            getattr(found.first.weight, kind)(lambda g: None)
            Owner(found)


WRITES = {
    "in place": lambda p: p.mul_(0.9),
    ".data": lambda p: setattr(p, "data", p.data * 0.9),
    "requires_grad": lambda p: p.requires_grad_(not p.requires_grad),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_step_that_writes_to_a_parameter_is_refused(name):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.teacher = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                WRITES[name](self.teacher.weight)
            return (self.first(x) - self.teacher(x)).square().mean()

    module = Writes()
    state = zerofn.shard(zerofn.TrainState.create(params=dict(module.named_parameters()), tx=optim.sgd(0.1)))

    @zerofn.compile
    def step(state, x):
        loss, grads = state.value_and_grad(lambda params, x: call_with(module, params, (x,)))(x)
        return state.apply_gradients(grads), loss

    with pytest.raises(Exception, match="the step writes to the parameter 'teacher.weight', or sets its requires_grad"):
        step(state, torch.ones(2, 3))


def test_a_step_that_reads_past_what_it_is_given_is_refused():
    module, owner, _ = pair()
    with (
        owner.live.in_step(),
        pytest.raises(RuntimeError, match="reads the parameter 'first.weight' from somewhere other than its module"),
    ):
        module.first.weight.sum()


def test_a_parameter_that_is_referred_to_weakly_becomes_another_object():
    module = Tied()
    before = weakref.ref(module.first.weight)
    owner = Owner(module)
    assert before() is not module.first.weight and is_live(module)
    with torch.no_grad():
        module.first.weight.zero_()
    owner.live.settle()
    assert not zerofn.unshard(owner.state.params)["first.weight"].any()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))


def test_buffers_are_the_states():
    module = Counting()
    owner = Owner(module)
    held, state = module.norm.running_mean, owner.state
    module.norm.running_mean.add_(1)  # in place: the state's own memory
    owner.live.settle()
    assert owner.state is state and (state.extra["norm.running_mean"] == 1).all()
    module.mean = torch.full((3,), 5.0)  # another tensor
    module.norm.num_batches_tracked = module.norm.num_batches_tracked + 2
    owner.live.settle()
    assert (owner.state.extra["mean"] == 5).all() and owner.state.extra["norm.num_batches_tracked"] == 2
    module.mean.mul_(2)
    assert (owner.state.extra["mean"] == 10).all()
    extra = {name: x + 3 for name, x in owner.state.extra.items()}
    owner.state = dataclasses.replace(owner.state, extra=extra)  # as a step does
    owner.live.renew()
    assert held is module.norm.running_mean and (held == 4).all() and (module.mean == 13).all()
    module.mean = None
    with pytest.raises(ValueError, match="the buffer 'mean' was deleted"):
        owner.live.settle()


def alone(elsewhere):
    agreement.ELSEWHERE = 2.0
    module, owner, _ = pair()
    owner.live.settle()
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        if zerofn.rank() == 0:
            module.first.weight.norm()
        elif elsewhere == "torch":
            dist.barrier()
        else:
            zerofn.save("nowhere", owner.state)
    assert time.monotonic() - start < 15
    return str(explained(caught.value))


@pytest.mark.part(elsewhere=["torch"])
@pytest.mark.parametrize("elsewhere", ["torch", "zerofn"])
def test_a_rank_that_uses_a_parameter_alone_tells_all_where_and_what_to_write(ranks, elsewhere):
    for text in ranks(2, alone, elsewhere, expect_errors=True):
        assert f"{__file__}:" in text and "(module.first.weight.norm())" in text
        assert "'first.weight' of Tied" in text and "with trainer.strategy.whole_model():" in text
        assert elsewhere == "zerofn" or "Rank 1 has waited in torch.distributed.barrier at" in text
    ranks.stop()
