"""Evaluations that do what training does: write to parameters, and take gradients."""

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch import nn

import zerofn
from tests.support.lightning_runs import MARKS, trainer_of
from zerofn.integrations import transformers as ours
from zerofn.integrations.lightning import ZeroFnStrategy

pytestmark = MARKS


class Written(nn.Module):
    """A block that its own `forward` writes to where it is evaluated."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if not self.training:
            self.linear.weight.data.mul_(0.9)
        return torch.tanh(self.linear(x))


class Evaluated(pl.LightningModule):
    """An evaluation that trains: it writes in the ways that count versions and in those that do not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head, self.norms = nn.ModuleList([Written(), Written()]), nn.Linear(4, 1), []

    def loss(self, x):
        return self.head(self.blocks[1](self.blocks[0](x))).square().mean()

    def training_step(self, x, batch_idx):
        return self.loss(x)

    def validation_step(self, x, batch_idx):
        self.loss(x), self.loss(x)  # blocks are written to twice in a step
        self.head.weight.data.mul_(0.9)
        self.head.bias.data = self.head.bias.data + 0.1
        self.blocks[0].linear.bias.data[1:].fill_(0.3)

    def test_step(self, x, batch_idx):
        with torch.enable_grad():
            listed = list(self.parameters())
            grads = torch.autograd.grad(self.loss(x), listed)
            self.loss(x).backward()
        self.norms += [x.norm() for x in (*grads, *(p.grad for p in self.parameters()))]
        with torch.no_grad():
            self.head.weight -= 0.1 * grads[-2]
            self.blocks[0].linear.weight.sub_(grads[0])
        self.blocks[1].linear.bias = nn.Parameter(self.blocks[1].linear.bias + 0.2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def evaluated(*strategy):
    """Parameters after training with validation and after a test, and norms of the test's gradients."""
    module, x = Evaluated(), torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for inference in (True, False):
        trainer = trainer_of(
            ZeroFnStrategy(*strategy) if strategy else "auto", devices=zerofn.world_size() if strategy else 1,
            max_epochs=2, use_distributed_sampler=False, num_sanity_val_steps=0, inference_mode=inference,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(x, batch_size=3)
        trainer.fit(module, loader, loader) if inference else trainer.test(module, loader, verbose=False)
        found += [p.detach().clone() for p in module.parameters()]
    return found + module.norms


@pytest.mark.part(num_ranks=[2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_evaluation_of_lightning_writes_and_has_gradients(ranks, num_ranks):
    for stage in (3,) if num_ranks == 1 else (1, 3):
        found = evaluated(stage) if num_ranks == 1 else ranks(num_ranks, evaluated, stage, group=False)[0]
        torch.testing.assert_close(found, evaluated())


class Refuses(Evaluated):
    def validation_step(self, x, batch_idx):
        self.head.weight.data = self.head.weight.data.half()


def test_data_of_another_dtype_is_refused_in_an_evaluation():
    with pytest.raises(
        ValueError, match=r"assigns data of torch.float16 and shape \(1, 4\) to a parameter of torch.float32"
    ):
        trainer_of(ZeroFnStrategy()).validate(Refuses(), torch.utils.data.DataLoader(torch.ones(2, 4)), verbose=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.second(torch.tanh(self.first(x))).square().mean()}


def evaluated_by(library, folder):
    class OfGradients(library.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.enable_grad():
                grads = torch.autograd.grad(self.compute_loss(model, inputs), list(model.parameters()))
            model.first.bias.data.add_(0.1)
            self.model.second.weight.data = self.model.second.weight.data * 0.9
            return torch.stack([grad.norm() for grad in grads]).norm(), None, None

    args = library.TrainingArguments(
        str(folder), max_steps=2, eval_strategy="steps", eval_steps=1, per_device_train_batch_size=4, use_cpu=True,
        per_device_eval_batch_size=16 // zerofn.world_size(),
        report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=0.1, optim="sgd", label_names=["x"],
    )  # fmt: skip
    rows = [{"x": torch.full((4,), 0.3)}] * 16  # the same on all ranks
    trainer = OfGradients(Net(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    found = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
    return torch.tensor(found), [p.detach().clone() for p in trainer.model.parameters()]


class Ours:
    Trainer, TrainingArguments = ours.Trainer, ours.TrainingArguments


def on_both(folder):
    return evaluated_by(Ours, folder)


@pytest.mark.part(num_ranks=[2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_evaluation_of_trainer_writes_and_has_gradients(ranks, tmp_path, num_ranks):
    found = on_both(tmp_path) if num_ranks == 1 else ranks(num_ranks, on_both, tmp_path, group=False)[0]
    torch.testing.assert_close(found, evaluated_by(transformers, tmp_path))
