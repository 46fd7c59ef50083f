"""Lightning's Trainer with ZeroFn's strategy, beside its own on one process."""

import copy
import os

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import zerofn
from tests.support import lightning_runs
from tests.support.lightning_runs import MARKS
from zerofn.integrations.lightning import ZeroFnStrategy

pytestmark = MARKS

WIDTH, CLASSES, ROWS = 6, 3, 48


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two linear layers; a batch norm, which has buffers."""

    def __init__(self, batch_norm=True):
        super().__init__()
        self.first = nn.Linear(WIDTH, 16, bias=False)
        self.batch_norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.batch_norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Module(pl.LightningModule):
    """What people write: logs, metrics and branches in validation, groups, a schedule."""

    def __init__(self, optimizer="AdamW", schedule="cosine", batch_norm=True, **more):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.accuracy, self.seen = Net(batch_norm), MulticlassAccuracy(CLASSES), []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"norm": x.norm(), "batch": batch_idx * 1.0})
        return {"loss": loss, "rows": x.sum(1)}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        if logits.isfinite().all():
            self.accuracy(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_accuracy", self.accuracy)
        self.seen.append(batch_idx)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self):
        plain = [p for p in self.parameters() if p.ndim == 1]
        decays = [p for p in self.parameters() if p.ndim > 1]
        kind, options = getattr(torch.optim, self.hparams.optimizer), dict(self.hparams.get("options") or {})
        groups = [{"params": decays}, {"params": plain, **self.hparams.get("second", {"weight_decay": 0.0})}]
        optimizer = kind(groups, **{"lr": 0.02, "weight_decay": 0.1, **options})
        schedulers = torch.optim.lr_scheduler
        if self.hparams.schedule == "cosine":
            return [optimizer], [{"scheduler": schedulers.CosineAnnealingLR(optimizer, 20), "interval": "step"}]
        if self.hparams.schedule == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.hparams.schedule == "two":
            return [optimizer], [schedulers.LambdaLR(optimizer, [lambda k: 1.0, lambda k: 1.0 / (k + 1)])]
        return optimizer


class Kept(pl.Callback):
    def __init__(self):
        self.losses, self.rates = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        assert outputs["rows"].shape == (len(batch[0]),)
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def loader(rows=8):
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, WIDTH, generator=draw), torch.randint(0, CLASSES, (ROWS,), generator=draw)
    return DataLoader(TensorDataset(x, y), batch_size=rows)


def trainer_of(strategy="auto", folder=None, devices=1, **more):
    given = {"max_epochs": 2, "enable_checkpointing": folder is not None, "default_root_dir": folder and str(folder)}
    kept = Kept()
    given["callbacks"] = [kept, *more.pop("callbacks", [])]
    return lightning_runs.trainer_of(strategy, devices=devices, **{**given, **more}), kept


def fitted(strategy="auto", module=None, seed=3, **more):
    pl.seed_everything(seed, verbose=False)
    module = Module(**more.pop("options", {})) if module is None else module()
    trainer, kept = trainer_of(strategy, **more)
    trainer.fit(module, loader(), loader())
    return trainer, kept, module


CASES = {
    "plain": ({}, {}),
    "accumulating": ({"accumulate_grad_batches": 4}, {}),
    "clipped": ({"gradient_clip_val": 0.1}, {}),
    "clipped by value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
    "plateau": ({}, {"schedule": "plateau"}),
    "sgd": ({}, {"optimizer": "SGD", "options": {"momentum": 0.9, "nesterov": True}}),
    "adam": ({}, {"optimizer": "Adam"}),
    "adagrad": ({}, {"optimizer": "Adagrad", "options": {"initial_accumulator_value": 0.1}}),
    "rmsprop": ({}, {"optimizer": "RMSprop", "options": {"centered": True, "momentum": 0.9, "lr": 1e-3, "eps": 1e-3}}),
    "two rates": ({}, {"schedule": "two", "second": {"lr": 0.01, "betas": (0.8, 0.9)}}),
}


@pytest.mark.part(name=["accumulating", "two rates"])
@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_lightning(name, caplog):
    caplog.set_level("INFO", "zerofn")
    more, options = CASES[name]
    plain, theirs, expected = fitted(**more, options=options)
    mine, ours, module = fitted(ZeroFnStrategy(stage=3), **more, options=options)
    captures = [x for x in caplog.messages if ": captured " in x]
    assert len(captures) == (2 if name == "accumulating" else 1), captures
    assert len(ours.losses) == len(theirs.losses) == 12
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
    assert ours.rates == theirs.rates and mine.global_step == plain.global_step
    assert set(mine.callback_metrics) == set(plain.callback_metrics)
    for key, x in plain.callback_metrics.items():
        torch.testing.assert_close(mine.callback_metrics[key], x, rtol=1e-4, atol=1e-5)
    assert len(module.seen) == 2 + 12  # the sanity check, and two epochs
    assert "WORLD_SIZE" not in os.environ and not torch.distributed.is_initialized()
    assert type(module) is Module
    for (name, p), want in zip(module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), want.detach(), rtol=1e-3, atol=1e-5, msg=name)


def on_ranks(stage, folder, resume=None, epochs=2, **more):
    """On every rank: the mean of all ranks' losses, metrics, and the parameters."""
    rank, ranks = zerofn.rank(), zerofn.world_size()
    pl.seed_everything(3 + rank, verbose=False)  # rank 0's parameters count
    trainer, kept = trainer_of(
        ZeroFnStrategy(stage=stage, **more), folder, devices=ranks, max_epochs=epochs, use_distributed_sampler=False
    )
    module = Module(batch_norm=False)
    data = DataLoader([(x[rank::ranks], y[rank::ranks]) for x, y in loader()], batch_size=None)
    trainer.fit(module, data, data, ckpt_path=resume)
    path = trainer.checkpoint_callback.best_model_path
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    losses = [float(x) for x in zerofn.collectives.all_reduce(torch.tensor(kept.losses)) / ranks]
    found = trainer.predict(module, data)
    with trainer.strategy.whole_model():
        again = module(next(iter(data))[0]).argmax(-1)
    assert torch.equal(again, found[0])
    return losses, metrics, zerofn.unshard(trainer.strategy.state.params), path


@pytest.mark.whole
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_ranks_are_one_with_all_rows(ranks, tmp_path, stage):
    plain, kept, module = fitted(options={"batch_norm": False})
    losses, metrics, params, _ = ranks(2, on_ranks, stage, tmp_path, group=False)[0]
    np.testing.assert_allclose(losses, kept.losses, rtol=1e-5)
    for name, x in module.named_parameters():
        torch.testing.assert_close(params[name], x.detach(), rtol=1e-3, atol=1e-5)
    for name in ("val_loss", "val_accuracy", "train_loss_epoch"):  # reduced by Lightning
        assert metrics[name] == pytest.approx(float(plain.callback_metrics[name]), rel=1e-4)


@pytest.mark.whole
def test_a_checkpoint_goes_on_with_other_ranks(ranks, tmp_path):
    whole, kept, _ = fitted(max_epochs=4, options={"batch_norm": False})
    *_, path = ranks(2, on_ranks, 3, tmp_path, group=False)[0]
    assert zerofn.verify(f"{path}.zerofn") == []
    pl.seed_everything(99, verbose=False)
    again, more = trainer_of(ZeroFnStrategy(stage=1), max_epochs=4)
    again.fit(Module(batch_norm=False), loader(), loader(), ckpt_path=path)
    np.testing.assert_allclose(more.losses, kept.losses[12:], rtol=1e-4)
    assert more.rates == kept.rates[12:] and again.global_step == 24
    tested, _ = trainer_of(ZeroFnStrategy(stage=2))
    found = tested.validate(Module(batch_norm=False), loader(), ckpt_path=path, verbose=False)
    first, _, _ = fitted(options={"batch_norm": False})
    assert found[0]["val_loss"] == pytest.approx(float(first.callback_metrics["val_loss"]), rel=1e-4)


def test_a_run_that_goes_on_has_the_same_bits(tmp_path):
    whole, kept, _ = fitted(ZeroFnStrategy(stage=3), max_epochs=4)
    first, _, _ = fitted(ZeroFnStrategy(stage=3), folder=tmp_path)
    again, more = trainer_of(ZeroFnStrategy(stage=3), max_epochs=4)
    again.fit(Module(), loader(), loader(), ckpt_path=first.checkpoint_callback.best_model_path)
    assert more.losses == kept.losses[12:] and more.rates == kept.rates[12:]
    first.save_checkpoint(first.checkpoint_callback.best_model_path)  # over it
    assert zerofn.verify(f"{first.checkpoint_callback.best_model_path}.zerofn") == []


def test_weights_are_a_file_of_lightnings(tmp_path):
    mine, _, _ = fitted(ZeroFnStrategy(stage=3))
    mine.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    module = Module.load_from_checkpoint(tmp_path / "weights.ckpt").eval()
    plain, _ = trainer_of()
    found = plain.validate(module, loader(), verbose=False)[0]["val_loss"]
    assert found == pytest.approx(float(mine.callback_metrics["val_loss"]), rel=1e-5)


def test_a_run_of_lightnings_goes_on_here(tmp_path):
    """Weights, Adam's moments, schedule and the place in the data."""
    whole, kept, _ = fitted(max_epochs=4)
    first, _, _ = fitted(max_epochs=2)
    first.save_checkpoint(tmp_path / "theirs.ckpt")
    again, more = trainer_of(ZeroFnStrategy(stage=3), max_epochs=4)
    again.fit(Module(), loader(), loader(), ckpt_path=tmp_path / "theirs.ckpt")
    np.testing.assert_allclose(more.losses, kept.losses[12:], rtol=1e-4)
    assert more.rates == kept.rates[12:]


class Configured(Module):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = Net()


def test_configure_model_makes_shapes_only():
    plain, theirs, _ = fitted(module=Configured)
    mine, ours, _ = fitted(ZeroFnStrategy(stage=3), module=Configured)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)


@pytest.mark.whole  # test_a_run_that_goes_on_has_the_same_bits goes on, too
def test_a_second_fit_goes_on_and_so_does_a_second_trainer():
    found = []
    for strategies in (("auto", "auto"), (ZeroFnStrategy(stage=3), ZeroFnStrategy(stage=3))):
        trainer, kept, module = fitted(strategies[0])
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, loader(), loader())
        other, more = trainer_of(strategies[1])
        other.fit(module, loader(), loader())
        found.append(kept.losses + more.losses)
    assert len(found[0]) == 36
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def test_half_precision_is_autocast():
    """But for what is rounded elsewhere: weights of norms have half precision here."""
    plain, theirs, expected = fitted(precision="bf16-mixed")
    mine, ours, module = fitted(ZeroFnStrategy(stage=3), precision="bf16-mixed")  # of fp16 Lightning makes it on CPUs
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=5e-3)
    for name, x in expected.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), x, rtol=2e-2, atol=2e-3)
    losses = [float(x.callback_metrics["val_loss"]) for x in (mine, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.part(precision=["bf16-mixed"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_state_on_drives_is_trained_and_evaluated(tmp_path, precision):
    here, there = (
        fitted(ZeroFnStrategy(stage=3, offload=offload), precision=precision)
        for offload in (None, zerofn.Offload(params="nvme", optimizer="nvme", path=tmp_path))
    )
    assert there[1].losses == here[1].losses and there[0].callback_metrics == here[0].callback_metrics
    assert "val" in "".join(there[0].callback_metrics)


class ReadsPlace(Module):
    def training_step(self, batch, batch_idx):
        weight = (self.global_step + 1) / (self.trainer.global_step + 2) + float(self.current_epoch)
        return {"loss": nn.functional.cross_entropy(self(batch[0]), batch[1]) * weight, "rows": batch[0].sum(1)}


def test_a_step_that_reads_its_place():
    theirs, ours = fitted(module=ReadsPlace)[1], fitted(ZeroFnStrategy(), module=ReadsPlace)[1]
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)


def refused(name, body, **members):
    return type(name, (Module,), {"training_step": body, **members} if body else members)


def manual(self):
    Module.__init__(self)
    self.automatic_optimization = False


WRONG = {
    "manual": (refused("Manual", None, __init__=manual), "manual optimization calls backward itself"),
    "hook": (
        refused("Hook", None, on_after_backward=lambda self: None),
        "on_after_backward would not be called: gradients exist inside",
    ),
    "number": (refused("Number", lambda self, batch, k: self.log("a", 1.0)), "got a number in training_step"),
    "none": (refused("Nothing", lambda self, batch, k: None), "returned None, which skips a batch"),
    "rates": (
        refused("Rates", lambda self, batch, k: self.optimizers()),
        "calls self.optimizers\\(\\), but is captured",
    ),
    "none there": (
        refused("NoOptimizer", None, configure_optimizers=lambda self: None),
        "configure_optimizers returned no optimizer",
    ),
    "lbfgs": (
        refused("Lbfgs", None, configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters())),
        "LBFGS has no counterpart",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_has_no_counterpart_is_a_sentence(name):
    make, sentence = WRONG[name]
    with pytest.raises(ValueError, match=sentence):
        fitted(ZeroFnStrategy(), module=make)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"precision": "64-true"}, "precision='64-true' must be one of 32-true, bf16-mixed, 16-mixed"),
        ({"sync_batchnorm": True}, "sync_batchnorm=True. is not supported"),
        ({"plugins": type("Own", (Precision,), {})()}, "plugins=Own.*no method of this plugin would be called"),
        ({"detect_anomaly": True}, "detect_anomaly=True. has no effect"),
    ],
)
def test_options_without_an_effect(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        fitted(ZeroFnStrategy(), **given)


def test_codes_that_feed_back_are_refused():
    with pytest.raises(ValueError, match="each microbatch of accumulate_grad_batches has its own gradient. Write"):
        ZeroFnStrategy(wire=zerofn.Wire(reduce="int8", feedback=True))


class Taught(Module):
    """A teacher that Lightning does not know, as it is in none of the module's lists."""

    def __init__(self):
        super().__init__()
        self.__dict__["teacher"] = copy.deepcopy(self.net).requires_grad_(False).eval()

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            wanted = self.teacher(batch[0])
        found = super().training_step(batch, batch_idx)
        return {**found, "loss": found["loss"] + (self(batch[0]) - wanted).square().mean()}


def test_a_teacher_outside_of_the_modules_lists_is_a_constant():
    (*_, plain), (*_, ours) = (fitted(strategy, module=Taught, max_epochs=1) for strategy in ("auto", ZeroFnStrategy()))
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], x, rtol=1e-5, atol=1e-6)


def test_a_lazy_layer_is_told_before_anything():
    class Lazy(Module):
        def __init__(self):
            super().__init__()
            self.net.head = nn.LazyLinear(CLASSES)

    with pytest.raises(ValueError, match=r"Lazy: 'net.head.weight' has no shape.*self\(example\)"):
        fitted(ZeroFnStrategy(), module=Lazy)


def test_a_branch_on_data_is_told():
    def body(self, batch, batch_idx):
        if batch_idx > 3:
            return self(batch[0]).sum()
        return self(batch[0]).mean()

    with pytest.raises(zerofn.CaptureError):
        fitted(ZeroFnStrategy(), module=refused("Branches", body))


class Swaps(pl.Callback):
    """Sets weights for the validation, and the old ones behind it: as callbacks with averaged weights do."""

    def on_validation_epoch_start(self, trainer, module):
        self.kept = {name: x.clone() for name, x in module.state_dict().items() if x.is_floating_point()}
        for p in module.parameters():
            p.data.mul_(0.5)
        module.net.batch_norm.running_mean.add_(1)

    def on_validation_epoch_end(self, trainer, module):
        module.load_state_dict(self.kept, strict=False)


@pytest.mark.whole
@pytest.mark.part(precision=["bf16-mixed"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_of_another_kind_for_the_validation(tmp_path, precision):
    found = []
    for strategy in ("auto", ZeroFnStrategy(stage=3)):
        trainer, kept, module = fitted(strategy, callbacks=[Swaps()], precision=precision, folder=tmp_path)
        found.append((kept.losses, float(trainer.callback_metrics["val_loss"])))
    tolerance = 1e-5 if precision == "32-true" else 0.1
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=tolerance)
    assert found[1][1] == pytest.approx(found[0][1], rel=tolerance)
