"""What research code asks of the parameters that the step lends to a model: penalties on them, and writes."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import transformers
from torch import nn

import zerofn
from tests.support.lightning_runs import MARKS, trainer_of
from zerofn.integrations.lightning import ZeroFnStrategy
from zerofn.integrations.transformers import Trainer, TrainingArguments

pytestmark = MARKS

PENALTIES = {
    "get_parameter": lambda m: m.get_parameter("b.weight").square().sum(),
    "get_submodule": lambda m: m.get_submodule("b").weight.T.square().sum(),
    "first of a list": lambda m: list(m.parameters())[0].square().sum(),
    "isinstance": lambda m: sum(p.square().sum() for p in m.b._parameters.values() if isinstance(p, nn.Parameter)),
    "leaves that learn": lambda m: sum(p.norm() for p in m.parameters() if p.is_leaf and p.requires_grad),
    "one vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).square().sum(),
    "in another module": lambda m: torch.func.functional_call(m.b, {"weight": m.a.weight[:1]}, (torch.ones(4),)).sum(),
    "a parameter list": lambda m: sum(p.square().sum() for p in nn.ParameterList([m.a.weight, m.b.weight])),
    "elastic weight consolidation": lambda m: sum((m.get_parameter(n) - x).square().sum() for n, x in m.old.items()),
    "assigned again": lambda m: setattr(m.a, "weight", m.a.weight) or m.a.weight.square().sum(),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
        self.old = {name: p.detach() + 0.1 for name, p in self.named_parameters()}
        self.shift = nn.Parameter(torch.tensor([2]), requires_grad=False)  # an integer

    def forward(self, x, y):
        loss = (self.b(self.a(x).relu()) + self.shift - y).square().mean()
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


@pytest.mark.part(num_ranks=[2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_penalties_on_parameters_in_a_trainers_loss(ranks, tmp_path, num_ranks):
    one = num_ranks == 1
    mine = of_trainer(tmp_path, Ours) if one else ranks(2, of_trainer, tmp_path, Ours, 2, group=False)[0]
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
    trainer_of(max_steps=3, default_root_dir=folder, **strategy).fit(
        module, torch.utils.data.DataLoader(rows(), batch_size=4)
    )
    return torch.stack(module.losses)


def test_penalties_on_parameters_in_a_training_step(tmp_path):
    mine = of_lightning(tmp_path, strategy=ZeroFnStrategy(stage=3))
    torch.testing.assert_close(mine, of_lightning(tmp_path), rtol=1e-5, atol=0)


class Moco(nn.Module):
    """A key encoder that follows another one in `forward`, and a queue of its outputs."""

    def __init__(self, learns):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.k.requires_grad_(learns)
        self.register_buffer("queue", torch.randn(8, 4))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def follow(self):
        for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1

    def enqueue(self, keys):
        at = int(self.at)
        self.queue[at : at + len(keys)] = keys
        self.at[0] = (at + len(keys)) % 8

    def forward(self, x, y):
        with torch.no_grad():
            self.follow()
        return self.loss_of(x, y)

    def loss_of(self, x, y):
        q, negatives = self.q(x), self.queue.clone()
        with torch.no_grad():
            keys = self.k(x)
            self.enqueue(keys)
        return {"loss": (q @ negatives.T).logsumexp(1).mean() - (q * keys).sum(1).mean() + (q.sum(1) - y).mean()}


class Foreach(Moco):
    def follow(self):
        torch._foreach_lerp_(list(self.k.parameters()), list(self.q.parameters()), 0.1)


class Copied(Moco):
    def follow(self):
        for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
            k.data[:].copy_(k.data * 0.9 + q.detach() * 0.1)


class OursOfMoco(Moco):
    """With what the errors say to write instead."""

    def forward(self, x, y):
        return self.loss_of(x, y)

    def enqueue(self, keys):
        self.queue[(self.at + torch.arange(len(keys))) % 8] = keys
        self.at[0] = (self.at[0] + len(keys)) % 8


class Follows(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            model.follow()


class FollowsOfLightning(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        with torch.no_grad():
            module.net.follow()


def moco_losses(folder, library, net, callbacks=()):
    args = library.TrainingArguments(str(folder), max_steps=4, per_device_train_batch_size=2, optim="sgd",
                                     learning_rate=0.05, logging_steps=1, report_to=[], use_cpu=True,
                                     save_strategy="no", disable_tqdm=True)  # fmt: skip
    trainer = library.Trainer(net, args, train_dataset=rows(), callbacks=list(callbacks))
    trainer.train()
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


def lightning_losses(folder, net, *callbacks, **strategy):
    module = Module()
    module.net, module.get_parameter = net, lambda name: torch.zeros(())
    trainer = trainer_of(max_steps=4, default_root_dir=folder, callbacks=[*callbacks], **strategy)
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=2))
    return torch.stack(module.losses).tolist()


def test_a_key_encoder_and_a_queue_as_the_errors_say(tmp_path):
    plain = moco_losses(tmp_path, transformers, Moco(False))
    np.testing.assert_allclose(moco_losses(tmp_path, Ours, OursOfMoco(False), [Follows()]), plain, rtol=1e-5)
    plain = lightning_losses(tmp_path, Moco(False))
    mine = lightning_losses(tmp_path, OursOfMoco(False), FollowsOfLightning(), strategy=ZeroFnStrategy())
    np.testing.assert_allclose(mine, plain, rtol=1e-5)


def raised(run):
    """What it raises, with its notes."""
    with pytest.raises((ValueError, zerofn.CaptureError)) as error:
        run()
    return "\n".join([str(error.value), *error.value.__notes__])


@pytest.mark.part(kind=[Moco])
@pytest.mark.part(learns=[True])
@pytest.mark.parametrize("kind, learns", [(Moco, False), (Foreach, False), (Copied, False), (Copied, True)])
def test_a_write_to_a_parameter_is_a_sentence_with_its_line(tmp_path, kind, learns):
    words = raised(lambda: moco_losses(tmp_path, Ours, kind(learns)))
    assert "writes to the parameter 'k.weight'" in words and "on_step_begin" in words
    line = {Moco: "k.data = k.data", Foreach: "torch._foreach_lerp_", Copied: "k.data[:].copy_"}[kind]
    assert line in words, words
    if kind is Moco:
        words = raised(lambda: lightning_losses(tmp_path, kind(learns), strategy=ZeroFnStrategy()))
        assert "writes to the parameter 'net.k.weight'" in words and line in words


class Cuts(OursOfMoco):
    enqueue = Moco.enqueue


def test_a_cut_at_a_number_of_a_buffer_is_a_sentence_with_its_line(tmp_path):
    for run in (
        lambda: moco_losses(tmp_path, Ours, Cuts(False)),
        lambda: lightning_losses(tmp_path, Cuts(False), strategy=ZeroFnStrategy()),
    ):
        words = raised(run)
        assert "Index with a tensor" in words and "self.queue[at : at + len(keys)] = keys" in words


class Addresses(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return sum(p.sum() for p in {p.data_ptr(): p for p in model.parameters()}.values())


def test_an_address_is_a_sentence(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    with pytest.raises(zerofn.CaptureError, match=r"the address of a tensor.*compare id\(p\)") as error:
        Addresses(Net(), args, train_dataset=rows()).train()
    assert "test_lent.py" in str(error.value) + "".join(error.value.__notes__)
