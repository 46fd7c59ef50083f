"""What a loss asks of the parameters that the step lends to a model: penalties on them, as research code writes them."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import transformers
from torch import nn

import zerofn
from zerofn.integrations.lightning import ZeroFnStrategy
from zerofn.integrations.transformers import Trainer, TrainingArguments

from .test_lightning import pytestmark as pytestmark

PENALTIES = {
    "get_parameter": lambda m: m.get_parameter("b.weight").square().sum(),
    "get_submodule": lambda m: m.get_submodule("b").weight.T.square().sum(),
    "first of a list": lambda m: list(m.parameters())[0].square().sum(),
    "isinstance": lambda m: sum(p.square().sum() for p in m.b._parameters.values() if isinstance(p, nn.Parameter)),
    "leaves that learn": lambda m: sum(p.norm() for p in m.parameters() if p.is_leaf and p.requires_grad),
    "one vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).square().sum(),
    "in another module": lambda m: torch.func.functional_call(m.b, {"weight": m.a.weight[:1]}, (torch.ones(4),)).sum(),
    "a parameter list": lambda m: sum(p.square().sum() for p in nn.ParameterList([m.a.weight, m.b.weight])),
    "elastic weight consolidation": lambda m: sum((p - m.old[n]).square().sum() for n, p in m.named_parameters()),
    "assigned again": lambda m: setattr(m.a, "weight", m.a.weight) or m.a.weight.square().sum(),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
        self.old = {name: p.detach() + 0.1 for name, p in self.named_parameters()}

    def forward(self, x, y):
        loss = (self.b(self.a(x).relu()) - y).square().mean()
        for k, penalty in enumerate(PENALTIES.values()):
            loss = loss + 0.003 * (k + 1) * penalty(self)
        return {"loss": loss}


def rows():
    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
    return [{"x": row[:4], "y": row[4:]} for row in x]


def of_trainer(folder, library, rank_rows=4):
    args = library.TrainingArguments(str(folder), max_steps=3, per_device_train_batch_size=rank_rows, optim="sgd",
                                     learning_rate=0.05, logging_steps=1, report_to=[], use_cpu=True,
                                     save_strategy="no", disable_tqdm=True, label_names=["y"])  # fmt: skip
    trainer = library.Trainer(Net(), args, train_dataset=rows(), eval_dataset=rows()[:8])
    trainer.train()
    logs = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    return [*logs, trainer.evaluate()["eval_loss"]]


class Ours:
    Trainer, TrainingArguments = Trainer, TrainingArguments


@pytest.mark.parametrize("ranks", [1, 2])
def test_penalties_on_parameters_in_a_trainers_loss(tmp_path, ranks):
    mine = of_trainer(tmp_path, Ours) if ranks == 1 else zerofn.run(of_trainer, tmp_path, Ours, 2, ranks=2)
    np.testing.assert_allclose(mine, of_trainer(tmp_path, transformers), rtol=1e-5)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = Net(), []

    def training_step(self, batch, batch_idx):
        loss = self.net(**batch)["loss"] + self.get_parameter("net.a.weight").square().sum()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def of_lightning(folder, **strategy):
    module = Module()
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, default_root_dir=folder, **strategy)  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=4))
    return torch.stack(module.losses)


def test_penalties_on_parameters_in_a_training_step(tmp_path):
    mine = of_lightning(tmp_path, strategy=ZeroFnStrategy(stage=3))
    torch.testing.assert_close(mine, of_lightning(tmp_path), rtol=1e-5, atol=0)


class Addresses(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return sum(p.sum() for p in {p.data_ptr(): p for p in model.parameters()}.values())


def test_an_address_is_a_sentence(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    with pytest.raises(zerofn.CaptureError, match=r"the address of a tensor.*compare id\(p\)") as error:
        Addresses(Net(), args, train_dataset=rows()).train()
    assert "test_lent.py" in str(error.value) + "".join(error.value.__notes__)
