"""What changes while Lightning trains: parameters that start to learn, groups, momentum, weight decay."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

import zerofn
from tests.support.lightning_runs import MARKS, trainer_of
from zerofn.integrations.lightning import ZeroFnStrategy

from .test_lightning import fitted

pytestmark = MARKS

schedulers = torch.optim.lr_scheduler


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return (self.head(self.backbone(batch[0])) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Unfreezes(Module):
    """Of one group: the second layer learns from the second epoch on, the first layer in the third."""

    def on_train_epoch_start(self):
        self.backbone[0].requires_grad_(self.current_epoch == 2)
        self.backbone[2].requires_grad_(self.current_epoch >= 1)


class FreezesAgain(Module):
    """The first layer learns in every second epoch, with the moments that it had."""

    def on_train_epoch_start(self):
        self.backbone[0].requires_grad_(self.current_epoch % 2 == 0)


class Finetunes(Module):
    """Lightning's callback adds a group."""

    def configure_callbacks(self):
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=5e-3)]

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


class Averages(Module):
    """Lightning's callback averages weights, has the average in the module at the end, and measures its batch norm."""

    def __init__(self):
        super().__init__()
        self.backbone[0] = nn.Linear(6, 8, bias=False)  # a bias has no gradient but rounding
        self.backbone[1] = nn.Sequential(nn.BatchNorm1d(8), nn.Tanh())

    def on_train_epoch_start(self):
        self.zero_grad()  # Lightning ends the measuring epoch with an update by gradients that are left

    def configure_callbacks(self):
        return [StochasticWeightAveraging(5e-3, swa_epoch_start=1)]


class AveragesEarly(Module):
    """A hook that sees the weights before their update, as many averages do."""

    def __init__(self):
        super().__init__()
        for name, p in self.head.named_parameters():
            self.register_buffer(f"mean_{name}", p.detach().clone())

    def on_before_zero_grad(self, optimizer):
        for name, p in self.head.named_parameters():
            getattr(self, f"mean_{name}").lerp_(p.detach(), 0.1)


class Cycles(Module):
    kind, options = torch.optim.AdamW, {"weight_decay": 0.1}

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=1e-2, **self.options)
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]

    def schedule(self, optimizer):
        return schedulers.OneCycleLR(optimizer, 0.05, 20)


class CyclesOfAdam(Cycles):
    kind = torch.optim.Adam


class CyclesOfSgd(Cycles):
    kind, options = torch.optim.SGD, {"momentum": 0.9, "nesterov": True}


class CyclesOfRmsprop(Cycles):
    kind, options = torch.optim.RMSprop, {"momentum": 0.9, "eps": 1e-3, "centered": True}

    def schedule(self, optimizer):
        return schedulers.CyclicLR(optimizer, 1e-3, 1e-2, 3)


class Decays(Module):
    """Weight decay by a hook, and rates that part: groups had shared their moments."""

    def configure_optimizers(self):
        groups = [{"params": self.backbone.parameters()}, {"params": self.head.parameters(), "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    def on_train_batch_start(self, batch, batch_idx):
        first, second = self.optimizers().param_groups
        second["lr"] = 1e-2 / (batch_idx + 1)
        if self.current_epoch > 0:
            first["weight_decay"] = 0.1 + 0.05 * batch_idx


class Kept(pl.Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.losses.append(float(outputs["loss"]))


def trained(make, strategy="auto", devices=1, **more):
    """The losses of three epochs, and the parameters at the end."""
    torch.manual_seed(0)
    module, kept = make(), Kept()
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    batches = [(a[zerofn.rank() :: devices], a.sum(1, keepdim=True)[zerofn.rank() :: devices]) for a in x.split(8)]
    given = {"max_epochs": 3, "callbacks": [kept], "use_distributed_sampler": False, **more}
    trainer = trainer_of(strategy, devices=devices, **given)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    losses = torch.tensor(kept.losses)
    losses = losses if devices == 1 else zerofn.collectives.all_reduce(losses) / devices
    return losses.numpy(), {name: x.clone() for name, x in module.state_dict().items()}


CHANGES = [
    Unfreezes,
    FreezesAgain,
    Finetunes,
    Averages,
    AveragesEarly,
    Cycles,
    CyclesOfAdam,
    CyclesOfSgd,
    CyclesOfRmsprop,
    Decays,
]


@pytest.mark.part(make=[Unfreezes, AveragesEarly, Cycles])
@pytest.mark.parametrize("make", CHANGES, ids=lambda x: x.__name__)
def test_a_module_that_changes_while_it_trains_trains_as_under_lightning(make):
    (theirs, wanted), (ours, found) = trained(make), trained(make, ZeroFnStrategy(stage=3))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


BY_RANKS = [Unfreezes, FreezesAgain, Finetunes, Cycles]


def on_ranks(stage):
    return [trained(make, ZeroFnStrategy(stage=stage), devices=2) for make in BY_RANKS]


@pytest.mark.whole
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_are_one(ranks, stage):
    for make, (losses, params) in zip(BY_RANKS, ranks(2, on_ranks, stage, group=False)[0], strict=True):
        theirs, wanted = trained(make)
        np.testing.assert_allclose(losses, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(params, wanted, rtol=1e-5, atol=1e-6)


class OwnSizes(Module):
    def train_dataloader(self):
        """The ranks' batches have 4, 5, 6 and 6, 5, 4 rows."""
        sizes = (4, 5, 6) if zerofn.rank() == 0 else (6, 5, 4)
        x = torch.randn(15, 6, generator=torch.Generator().manual_seed(zerofn.rank()))
        return DataLoader([(a, a.sum(1, keepdim=True)) for a in x.split(sizes)], batch_size=None)


def of_own_sizes():
    found = []
    for strategy in ("ddp", ZeroFnStrategy(stage=3)):
        torch.manual_seed(0)
        module, kept = OwnSizes(), Kept()
        more = {"max_epochs": 2, "callbacks": [kept], "use_distributed_sampler": False}
        trainer_of(strategy, devices=2, **more).fit(module)
        found.append({"losses": torch.tensor(kept.losses), **{k: x.clone() for k, x in module.state_dict().items()}})
    theirs, ours = found
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.whole
def test_ranks_may_have_batches_of_other_sizes(ranks):
    ranks(2, of_own_sizes, group=False)


class ChangesEps(Module):
    def on_train_epoch_end(self):
        self.optimizers().param_groups[0]["eps"] = 1e-6


def test_what_may_not_change_is_told():
    with pytest.raises(
        ValueError,
        match="eps of group 0 has changed from 1e-08 to 1e-06, but during training only learning rates, betas",
    ):
        trained(ChangesEps, ZeroFnStrategy())


class FreezesAll(Module):
    def on_train_epoch_start(self):
        self.requires_grad_(False)


def test_nothing_to_train_is_told():
    with pytest.raises(ValueError, match="no parameter of the optimizer requires a gradient"):
        trained(FreezesAll, ZeroFnStrategy())


def test_moments_of_torchs_optimizer_are_refused_where_they_are_asked_for():
    class Asks(pl.Callback):
        def __init__(self, does):
            self.does = does

        def on_train_epoch_end(self, trainer, module):
            self.does(trainer, trainer.optimizers[0], module)

    def replaces(trainer, optimizer, module):
        trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), 0.1)]

    asks = {
        "optimizer.state is empty, because the moments are sharded": lambda t, o, m: o.state[next(m.parameters())],
        "optimizer.state is empty, because": lambda t, o, m: o.state.clear(),
        "optimizer.state is empty": lambda t, o, m: o.load_state_dict({**o.state_dict(), "state": {0: {"step": 1}}}),
        "the trainer's optimizer is not the one that configure_optimizers made": replaces,
    }
    for words, does in asks.items():
        with pytest.raises(ValueError, match=words):
            fitted(ZeroFnStrategy(stage=3), callbacks=[Asks(does)])
