"""Buffers that a step writes, on two ranks with rows of their own: rank 0's, as torch's DDP has them."""

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from tests.support.lightning_runs import MARKS, trainer_of
from zerofn.integrations import transformers as ours
from zerofn.integrations.lightning import ZeroFnStrategy
from zerofn.integrations.modules import call_with, check_memory

pytestmark = MARKS


class Net(nn.Module):
    """Batch norm's statistics, a queue of features with its place, which the loss reads, a codebook, and flags."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)
        self.register_buffer("queue", torch.ones(6, 8))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("codes", torch.eye(8)[:3].clone())
        self.register_buffer("seen", torch.zeros(8, dtype=torch.bool))
        self.register_buffer("scale", torch.tensor(2.0))  # which no step writes

    def forward(self, x, labels=None):
        y = self.norm(self.layer(x))
        loss = (y @ self.queue.T.clone()).logsumexp(1).mean() - self.scale * y[:, 0].mean()
        with torch.no_grad():
            at = (self.place + torch.arange(len(y))) % 6
            self.queue[at] = y.detach()
            self.place.add_(len(y)).remainder_(6)
            nearest = torch.cdist(y, self.codes).argmin(1)
            one_hot = nn.functional.one_hot(nearest, 3).to(y.dtype)
            self.codes = 0.9 * self.codes + 0.1 * one_hot.T @ y
            self.seen |= (y > 0.5).any(0)
        return {"loss": loss}


def rows(count=24):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": 0} for row in x]


def by_trainer(library, folder):
    args = library.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=1e-2, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, ddp_backend="gloo",
    )  # fmt: skip
    trainer = library.Trainer(Net(), args, train_dataset=rows())
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return dict(trainer.model.state_dict())


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        return self.net(batch["x"])["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)  # which makes nothing of rounding


def by_lightning(strategy):
    module = Module()
    trainer_of(strategy, devices=2, max_epochs=1).fit(module, DataLoader(rows(), batch_size=2))
    return dict(module.state_dict())


def on_ranks(folder):
    return {
        "transformers": [by_trainer(x, folder) for x in (transformers, ours)],
        "Lightning": [by_lightning(x) for x in ("ddp", ZeroFnStrategy(stage=3))],
    }


class Holds(nn.Module):
    """`what` is done to it at first, and `does` in every call."""

    def __init__(self, what, does=lambda m: None):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("q", torch.zeros(4, 2))
        self.register_buffer("none", None)
        what(self)
        self.does = does

    def forward(self, x):
        self.does(self)
        return self.inner(x)


MADE = {
    "none": lambda m: setattr(m, "none", torch.ones(2)),
    "late": lambda m: m.register_buffer("late", torch.ones(2)),
    "inner.late": lambda m: m.inner.register_buffer("late", torch.ones(2)),
    "weight": lambda m: setattr(m, "weight", nn.Parameter(torch.ones(2))),
}


@pytest.mark.parametrize("name", MADE)
def test_a_step_makes_no_buffers(name):
    """What it would leave in the module has no value."""
    module = Holds(lambda m: None, MADE[name])
    values = dict((*module.named_parameters(), *module.named_buffers()))
    with pytest.raises(ValueError, match=rf"the step creates '{name}'.*register_buffer\(\"{name.split('.')[-1]}\""):
        call_with(module, values, (torch.ones(1, 2),))
    assert dict((*module.named_parameters(), *module.named_buffers())).keys() == values.keys()


VIEWS = {"row": lambda m: setattr(m, "row", m.q[0]), "inner.all": lambda m: setattr(m.inner, "all", m.q)}


@pytest.mark.parametrize("name", VIEWS)
def test_a_buffer_that_an_attribute_shares_is_not_written(name):
    for does in (lambda m: None, lambda m: m.q[0].add_(1)):
        module = Holds(VIEWS[name], does)
        check_memory(module)
        values = {n: x.detach().clone() for n, x in (*module.named_parameters(), *module.named_buffers())}
        if does(module) is None:
            call_with(module, values, (torch.ones(1, 2),))
            continue
        with pytest.raises(ValueError, match=f"writes to the buffer 'q', whose memory the attribute '{name}' shares"):
            call_with(module, values, (torch.ones(1, 2),))


SHARED = {
    "buffers": lambda m: m.register_buffer("row", m.q[1]),
    "columns": lambda m: m.register_buffer("column", m.q[:, 1]),
    "parameters": lambda m: setattr(m, "w", nn.Parameter(m.inner.weight.data[:1])),
}
APART = {
    "one under two names": lambda m: m.register_buffer("other", m.q),
    "tied": lambda m: setattr(m, "w", m.inner.weight),
    "side by side": lambda m: [m.register_buffer(f"part{k}", x) for k, x in enumerate(torch.zeros(4, 2).split(2))],
    "nothing": lambda m: m.register_buffer("empty", m.q[:0]),
}


@pytest.mark.parametrize("name", [*SHARED, *APART])
def test_memory_is_shared_by_one_tensor_alone(name):
    module = Holds((SHARED | APART)[name])
    if name in APART:
        check_memory(module)
        return
    with pytest.raises(ValueError, match="Holds: '.*' and '.*' share memory, but are different tensors"):
        check_memory(module)


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory):
    return ranks(2, on_ranks, tmp_path_factory.mktemp("buffers"), group=False)[0]  # with these DDP's ranks go on


@pytest.mark.parametrize("case", ["transformers", "Lightning"])
def test_ranks_have_the_buffers_of_the_first(found, case):
    theirs, mine = found[case]
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert any(x.any() for name, x in mine.items() if name.endswith("seen"))
