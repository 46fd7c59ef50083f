"""A module between steps and after training: its weights in callbacks, in Lightning's files, in another run."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import zerofn
from tests.support import lightning_runs
from tests.support.lightning_runs import MARKS
from zerofn.integrations.lightning import ZeroFnStrategy

pytestmark = MARKS


class Module(pl.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(6, width, bias=False), nn.BatchNorm1d(width), nn.Tanh())
        self.head = nn.Linear(width, 1)
        self.losses = []

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


class Tuned(Module):
    def __init__(self, width=8):
        super().__init__(width)
        self.backbone[1] = nn.Identity()

    def configure_callbacks(self):
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=5e-3)]


def data(devices=1):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    batches = [
        (a[zerofn.rank() :: devices], b[zerofn.rank() :: devices]) for a, b in zip(x.split(8), y.split(8), strict=True)
    ]
    return DataLoader(batches, batch_size=None)


def trainer_of(strategy, folder, devices=1, **more):
    given = {"max_epochs": 2, "default_root_dir": str(folder), "use_distributed_sampler": False}
    return lightning_runs.trainer_of(strategy, devices=devices, **{**given, "enable_checkpointing": True, **more})


def fitted(strategy, folder, make=Module, resume=None, devices=1, **more):
    torch.manual_seed(0)
    module = make()
    trainer = trainer_of(strategy, folder, devices, **more)
    trainer.fit(module, data(devices), data(devices), ckpt_path=resume)
    return trainer, module


def on_ranks(folder):
    trainer, module = fitted(ZeroFnStrategy(stage=3), folder, devices=2)
    again = Module.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    for name, x in zerofn.unshard(trainer.strategy.state.params).items():
        torch.testing.assert_close(again.get_parameter(name).detach(), x)
    return trainer.checkpoint_callback.best_model_path


def test_lightning_opens_the_best_checkpoint(tmp_path):
    trainer, module = fitted(ZeroFnStrategy(stage=3), tmp_path)
    path = trainer.checkpoint_callback.best_model_path
    module.eval()
    x = torch.ones(3, 6)
    again = Module.load_from_checkpoint(path).eval()
    torch.testing.assert_close(again(x), module(x).detach(), rtol=0, atol=0)
    plain = trainer_of("auto", tmp_path, callbacks=[])
    found = plain.validate(Module(), data(), ckpt_path=path, verbose=False)
    assert found[0]["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-6)
    trainer.strategy.remove_checkpoint(path)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.whole
def test_lightning_opens_what_two_ranks_have_written(ranks, tmp_path):
    path = ranks(2, on_ranks, tmp_path, group=False)[0]
    trainer, module = fitted(ZeroFnStrategy(), tmp_path, resume=path, max_epochs=3)
    assert trainer.global_step == 12 and len(module.losses) == 4


def with_ema(strategy, folder):
    """The losses, the weights, those that Lightning opens, and the weights of a run that goes on."""
    kept = {"callbacks": [EMAWeightAveraging(decay=0.8), ModelCheckpoint(folder, save_top_k=-1)]}
    trainer, module = fitted(strategy(), folder, max_epochs=3, **kept)
    path = next(iter(folder.glob("epoch=1-*.ckpt")))
    again = {"callbacks": [EMAWeightAveraging(decay=0.8)], "enable_checkpointing": False}
    _, resumed = fitted(strategy(), folder, resume=path, max_epochs=3, **again)
    assert resumed.losses == pytest.approx(module.losses[8:], rel=1e-5)
    found = [x.state_dict() for x in (module, Module.load_from_checkpoint(path), resumed)]
    return module.losses, [{k: x.clone() for k, x in each.items()} for each in found]


@pytest.mark.whole  # test_lightning_changes averages, too
def test_an_average_of_weights_is_lightnings(tmp_path):
    theirs, ours = with_ema(lambda: "auto", tmp_path / "theirs"), with_ema(ZeroFnStrategy, tmp_path / "ours")
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-6)


def test_a_run_whose_groups_have_changed_does_not_go_on(tmp_path):
    trainer, _ = fitted(ZeroFnStrategy(), tmp_path, Tuned)
    path = trainer.checkpoint_callback.best_model_path
    with pytest.raises(zerofn.CheckpointError) as error:
        fitted(ZeroFnStrategy(), tmp_path, Tuned, resume=path, max_epochs=3)
    assert "The optimizer's groups, or the trained parameters, differ" in error.value.__notes__[-1]
    Tuned.load_from_checkpoint(path)
