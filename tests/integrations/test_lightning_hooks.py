"""Every method of Lightning's classes: called as often as without ZeroFn, refused, or said why it is neither."""

import inspect
from collections import Counter

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zerofn
from tests.support.lightning_runs import MARKS, trainer_of
from zerofn.integrations.lightning import ZeroFnStrategy

pytestmark = MARKS

# Of each class: the methods that are called as often with ZeroFn, and of the others what becomes of an override.
MODULE_CALLED = """
configure_callbacks configure_optimizers lr_scheduler_step on_after_batch_transfer on_before_batch_transfer
on_before_zero_grad on_fit_end on_fit_start on_load_checkpoint on_predict_batch_end on_predict_batch_start
on_predict_end on_predict_epoch_end on_predict_epoch_start on_predict_model_eval on_predict_start on_save_checkpoint
on_test_batch_end on_test_batch_start on_test_end on_test_epoch_end on_test_epoch_start on_test_model_eval
on_test_model_train on_test_start on_train_batch_end on_train_batch_start on_train_end on_train_epoch_end
on_train_epoch_start on_train_start on_validation_batch_end on_validation_batch_start on_validation_end
on_validation_epoch_end on_validation_epoch_start on_validation_model_eval on_validation_model_train
on_validation_model_zero_grad on_validation_start optimizer_step predict_dataloader predict_step prepare_data setup
teardown test_dataloader test_step train_dataloader transfer_batch_to_device val_dataloader validation_step
""".split()
MODULE_OTHERS = {
    **dict.fromkeys(
        ("backward", "configure_gradient_clipping", "on_after_backward", "on_before_backward")
        + ("on_before_optimizer_step", "optimizer_zero_grad"),
        "refused: gradients exist inside the compiled step only",
    ),
    "configure_model": "called once more: for the shapes of the parameters, and for their values",
    "configure_sharded_model": "refused by Lightning, which has removed it",
    **dict.fromkeys(
        ("all_gather", "training_step"), "called when the step is captured: a compiled step calls nothing of Python"
    ),
    **dict.fromkeys(("log", "log_dict", "print"), "called in training_step: when the step has run, with its values"),
    **dict.fromkeys(
        ("clip_gradients", "freeze", "lr_schedulers", "manual_backward", "optimizers", "unfreeze")
        + ("toggle_optimizer", "toggled_optimizer", "untoggle_optimizer"),
        "called by users; refused in training_step, which is captured",
    ),
    **dict.fromkeys(
        ("remove_ignored_hparams", "save_hyperparameters", "to_onnx", "to_tensorrt", "to_torchscript"),
        "called by users",
    ),
}
CALLBACK_CALLED = """
load_state_dict on_before_zero_grad on_exception on_fit_end on_fit_start on_load_checkpoint on_predict_batch_end
on_predict_batch_start on_predict_end on_predict_epoch_end on_predict_epoch_start on_predict_start
on_sanity_check_end on_sanity_check_start on_save_checkpoint on_test_batch_end on_test_batch_start on_test_end
on_test_epoch_end on_test_epoch_start on_test_start on_train_batch_end on_train_batch_start on_train_end
on_train_epoch_end on_train_epoch_start on_train_start on_validation_batch_end on_validation_batch_start
on_validation_end on_validation_epoch_end on_validation_epoch_start on_validation_start setup state_dict teardown
""".split()
CALLBACK_OTHERS = dict.fromkeys(
    ("on_after_backward", "on_before_backward", "on_before_optimizer_step"),
    "refused: gradients exist inside the compiled step only",
)
DATA_CALLED = """
load_state_dict on_after_batch_transfer on_before_batch_transfer on_exception predict_dataloader prepare_data setup
state_dict teardown test_dataloader train_dataloader transfer_batch_to_device val_dataloader
""".split()
DATA_OTHERS = dict.fromkeys(("remove_ignored_hparams", "save_hyperparameters"), "called by users")
STRATEGY_CALLED = """
backward barrier batch_to_device connect load_checkpoint load_model_state_dict load_optimizer_state_dict
lightning_module_state_dict model_to_device on_exception on_predict_end on_predict_start
on_test_end on_test_start on_train_batch_start on_train_end on_train_start on_validation_end on_validation_start
optimizer_state optimizer_step post_training_step predict_step process_dataloader reduce_boolean_decision
save_checkpoint setup setup_environment setup_optimizers teardown test_step training_step
validation_step
""".split()
STRATEGY_OTHERS = {
    **dict.fromkeys(("broadcast", "reduce"), "called more often: ZeroFn itself speaks to all ranks by them"),
    **dict.fromkeys(("model_sharded_context", "tensor_init_context"), "called around configure_model"),
    "all_gather": "called by users, and by metrics",
    **dict.fromkeys(
        ("block_backward_sync", "post_backward", "pre_backward", "setup_precision_plugin"),
        "called by Lightning's own strategies: gradients exist inside the compiled step only",
    ),
    "remove_checkpoint": "called where ModelCheckpoint drops a checkpoint",
}


def methods(kind, *without):
    """The names of the public methods that a class has, and those that are without them have not."""
    theirs = {name for other in without for name in dir(other)}
    names = (name for name in dir(kind) if not name.startswith("_") and name not in theirs)
    return {name for name in names if inspect.isfunction(inspect.getattr_static(kind, name))}


def counted(kind, names, calls):
    """A subclass that overrides all of these methods and counts their calls."""

    def counting(name):
        def method(self, *args, **kwargs):
            calls[name] += 1
            return getattr(super(made, self), name)(*args, **kwargs)

        return method

    made = type("Counted", (kind,), {name: counting(name) for name in names})
    return made


class Remembers(pl.Callback):
    def state_dict(self):
        return {"a": 1}


class RemembersData(BoringDataModule):
    def state_dict(self):
        return {"a": 1}


class Classes:
    """Counted classes, and how often the methods of each were called."""

    def __init__(self, strategy, **given):
        self.calls = {name: Counter() for name in ("module", "callback", "data", "strategy")}
        self.module = counted(BoringModel, MODULE_CALLED, self.calls["module"])
        self.callback = counted(Remembers, CALLBACK_CALLED, self.calls["callback"])
        self.data = counted(RemembersData, DATA_CALLED, self.calls["data"])
        self._strategy, self._given = counted(strategy, STRATEGY_CALLED, self.calls["strategy"]), given

    def strategy(self):
        return self._strategy(**self._given)


def used(classes, folder):
    """Everything that a Trainer does, on four batches."""

    def trainer(**more):
        given = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 2, "limit_test_batches": 2}
        given |= {"limit_predict_batches": 2, "default_root_dir": folder, "enable_checkpointing": True}
        given |= {"devices": zerofn.world_size(), "callbacks": [classes.callback()]}
        return trainer_of(classes.strategy(), **{**given, **more})

    for make, *data in ((classes.module,), (BoringModel, classes.data())):
        first, module = trainer(), make()
        first.fit(module, *data)
        first.validate(module, *data, verbose=False)
        first.test(module, *data, verbose=False)
        first.predict(module, *data)
        last = first.checkpoint_callback.best_model_path
        trainer(max_epochs=3).fit(make(), *data, ckpt_path=last)
        with pytest.raises(KeyError):
            trainer(callbacks=[classes.callback(), Fails()]).fit(make(), *data)


class Fails(pl.Callback):
    def on_train_batch_end(self, *_):
        raise KeyError


TABLES = {
    "module": (methods(pl.LightningModule, nn.Module), MODULE_CALLED, MODULE_OTHERS),
    "callback": (methods(pl.Callback), CALLBACK_CALLED, CALLBACK_OTHERS),
    "data": (methods(pl.LightningDataModule), DATA_CALLED, DATA_OTHERS),
    "strategy": (methods(ParallelStrategy), STRATEGY_CALLED, STRATEGY_OTHERS),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_has_every_method(name):
    found, called, others = TABLES[name]
    assert sorted(found) == sorted([*called, *others])


def both(folder):
    """How often methods are called: (by Lightning's own strategy, by ZeroFn's)."""
    torch.manual_seed(0)
    alone = zerofn.world_size() == 1
    theirs = Classes(SingleDeviceStrategy, device="cpu") if alone else Classes(DDPStrategy)
    ours = Classes(ZeroFnStrategy)
    for name, classes in (("theirs", theirs), ("ours", ours)):
        used(classes, folder / name)
    return theirs.calls, ours.calls


def check(folder):
    theirs, ours = both(folder)
    for name, (_, called, _) in TABLES.items():
        assert {x: ours[name][x] for x in called} == {x: theirs[name][x] for x in called}, name
        assert zerofn.rank() > 0 or [x for x in called if not theirs[name][x]] == []  # prepare_data is rank 0's


def test_methods_are_called_as_often(tmp_path):
    check(tmp_path)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
def test_methods_are_called_as_often_on_ranks(ranks, tmp_path):
    """As by DDP, on each rank."""
    ranks(2, check, tmp_path, group=False)


REFUSED = [
    (name, x) for name in ("module", "callback") for x, why in TABLES[name][2].items() if why.startswith("refused: ")
]


@pytest.mark.parametrize("name, method", REFUSED)
def test_what_cannot_be_called_is_refused(name, method):
    kind = {"module": BoringModel, "callback": pl.Callback}[name]
    overrides = type("Overrides", (kind,), {method: lambda *_: None})()
    callbacks = [overrides] if name == "callback" else []
    trainer = trainer_of(ZeroFnStrategy(), max_epochs=1, callbacks=callbacks)
    with pytest.raises(
        ValueError, match=f"Overrides.{method} would not be called: gradients exist inside the compiled step only"
    ):
        trainer.fit(BoringModel() if callbacks else overrides)
    assert trainer.global_step == 0


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class EverySecond(Line):  # both as Lightning's documentation has them
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if (batch_idx + 1) % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class WarmUp(Line):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 5:
            scale = min(1.0, float(self.trainer.global_step + 1) / 5.0)
            for group in optimizer.param_groups:
                group["lr"] = scale * 0.05


class ClosureFirst(Line):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (batch_idx + 1)
        optimizer.step()


class ZeroGradFirst(Line):
    def on_before_zero_grad(self, optimizer):
        optimizer.param_groups[0]["lr"] *= 0.9  # before the update


def losses_of(make, strategy="auto", callbacks=(), **more):
    """The losses of two epochs of six batches, and the learning rates at the end."""
    torch.manual_seed(0)
    module, kept = make(), Losses()
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    trainer = trainer_of(strategy, callbacks=[*callbacks, kept], **{"max_epochs": 2, **more})
    trainer.fit(module, DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), 8))
    return kept.found


class Losses(pl.Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.found += [float(outputs["loss"]), *(group["lr"] for group in trainer.optimizers[0].param_groups)]


@pytest.mark.part(parts=[4])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("make", [EverySecond, WarmUp, ClosureFirst, ZeroGradFirst])
def test_an_overridden_step_of_the_optimizer_is_lightnings(make, parts):
    more = {"accumulate_grad_batches": parts}
    theirs, ours = losses_of(make, **more), losses_of(make, ZeroFnStrategy(), **more)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(set(theirs[::2])) == 12


class Twice(Line):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=lambda: (optimizer_closure(), optimizer_closure())[1])


class NoClosure(Line):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step()


@pytest.mark.parametrize(
    "make, sentence",
    [(Twice, "called optimizer_closure twice"), (NoClosure, "optimizer.step.. was called without gradients")],
)
def test_a_closure_runs_once_for_an_update(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        losses_of(make, ZeroFnStrategy())
