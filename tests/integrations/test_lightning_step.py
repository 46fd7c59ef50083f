"""What a training step logs, keeps and asks: the same as where Lightning calls it at every batch."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import zerofn
from tests.support.lightning_runs import MARKS, trainer_of
from zerofn.integrations.lightning import ZeroFnStrategy

pytestmark = MARKS


class Writer:
    def __init__(self):
        self.rows = []

    def add_scalar(self, name, value, step):
        assert type(step) is int
        self.rows.append((name, round(float(value), 5), step))


class Rows(Logger):
    """A logger that keeps what it is given."""

    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.experiment = Writer()

    def log_hyperparams(self, params):
        pass

    def log_metrics(self, metrics, step=None):
        self.experiment.rows.append((step, sorted((k, round(float(v), 5)) for k, v in metrics.items())))


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = nn.Linear(4, 3), []

    def loss_of(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Keeps(Module):
    """Lists, sums, printed lines; hooks that read them."""

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.seen.append(loss)
        self.total = self.total + loss.detach()
        self.last = {"loss": loss.item(), "batch": batch_idx}
        self.print("batch", batch_idx)
        return loss

    def on_train_epoch_start(self):
        self.total = torch.zeros(())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        torch.testing.assert_close(self.seen[-1].detach(), outputs["loss"])
        assert self.last == {"loss": outputs["loss"].item(), "batch": batch_idx}

    def on_train_epoch_end(self):
        self.log("kept", torch.stack(self.seen).mean().detach())
        self.log("sum", self.total)
        self.seen.clear()


class Logs(Module):
    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("number", loss.item(), on_step=True, on_epoch=True)
        self.log_dict({"a": loss.item() * 2, "b": loss.detach(), "batch": batch_idx * 1.0}, on_step=True)
        self.log("step", self.global_step * 1.0)
        if self.logger is not None:
            self.logger.experiment.add_scalar("own", loss.detach(), self.global_step)
        for logger in self.loggers:
            logger.log_metrics({"each": loss.item()}, step=self.trainer.global_step)
        return loss


class Measures(Module):
    """torchmetrics of all kinds: with the batch's value, objects in `log`, a collection, in a ModuleDict."""

    def __init__(self):
        super().__init__()
        self.accuracy, self.own = MulticlassAccuracy(3), nn.ModuleDict({"fit": MeanMetric()})
        self.both = MetricCollection([MulticlassAccuracy(3, average="micro"), MulticlassF1Score(3)])

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("batch_accuracy", self.accuracy(logits, batch[1]), on_step=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.own["fit"].update(loss)
        found = self.both(logits, batch[1])
        self.log_dict(found)
        return loss

    def on_train_epoch_end(self):
        self.log("mean", self.own["fit"].compute())
        self.log_dict({f"epoch_{k}": x for k, x in self.both.compute().items()})
        self.own["fit"].reset()
        self.both.reset()


def run(make, strategy="auto", devices=1):
    torch.manual_seed(0)
    module, rows = make(), Rows()
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 4, generator=draw), torch.randint(0, 3, (24,), generator=draw)
    batches = [
        (a[zerofn.rank() :: devices], b[zerofn.rank() :: devices]) for a, b in zip(x.split(6), y.split(6), strict=True)
    ]
    more = {"logger": rows, "max_epochs": 2, "log_every_n_steps": 1, "use_distributed_sampler": False}
    trainer = trainer_of(strategy, devices=devices, **more)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return rows.experiment.rows, {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize("make", [Keeps, Logs, Measures], ids=lambda x: x.__name__)
def test_a_captured_training_step_trains_and_logs_as_lightnings(make, capsys):
    theirs, wanted = run(make)
    printed = capsys.readouterr().out
    ours, found = run(make, ZeroFnStrategy())
    assert ours == theirs and len(theirs) > 1
    assert found == pytest.approx(wanted, rel=1e-5)
    assert capsys.readouterr().out == printed


def on_ranks():
    return [run(make, ZeroFnStrategy(), devices=2)[1] for make in (Measures, Keeps)]


@pytest.mark.whole
def test_metrics_are_of_all_ranks(ranks):
    measured, kept = ranks(2, on_ranks, group=False)[0]
    wanted = run(Measures)[1]
    for name in ("accuracy_epoch", "mean"):
        assert measured[name] == pytest.approx(wanted[name], rel=1e-5), name
    assert set(kept) == set(run(Keeps)[1])


def of(body):
    return type("Wrong", (Module,), {"training_step": body, "accuracy": None})


def as_loss(self, batch, batch_idx):
    return 1 - self.mean(self.loss_of(batch))


def stops(self, batch, batch_idx):
    self.trainer.should_stop = True
    return self.loss_of(batch)


def reads_rates(self, batch, batch_idx):
    self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
    return self.loss_of(batch)


def counts(self, batch, batch_idx):
    self.count += 1
    return self.loss_of(batch) / self.count


class WithMean(Module):
    def __init__(self):
        super().__init__()
        self.mean, self.count = MeanMetric(), 0


@pytest.mark.parametrize(
    "body, sentence",
    [
        (as_loss, "computes with the result of the metric MeanMetric"),
        (stops, "sets self.trainer.should_stop, but is captured"),
        (reads_rates, "reads self.trainer.optimizers, but is captured"),
        (counts, "reads self.count and changes it"),
    ],
)
def test_what_a_captured_step_cannot_do_is_told(body, sentence):
    make = type("Wrong", (WithMean,), {"training_step": body})
    with pytest.raises((ValueError, zerofn.CaptureError), match=sentence):
        run(make, ZeroFnStrategy())
