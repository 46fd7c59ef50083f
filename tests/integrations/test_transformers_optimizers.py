"""Optimizers, schedulers and steps that a script makes: what transformers' Trainer does with them, ZeroFn's does."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.support.trainer_runs import MARKS, build, logged, losses, options, rows
from zerofn.integrations import transformers as ours

pytestmark = MARKS


def optimizer_and_scheduler(kind):
    """Two groups with rates of their own, one of which has no decay, and schedules of their own."""

    class Mine(kind):
        def create_optimizer(self, model=None):
            head = [p for name, p in self.model.named_parameters() if "embed" in name]
            rest = [p for name, p in self.model.named_parameters() if "embed" not in name]
            groups = [{"params": head, "lr": 0.3}, {"params": rest, "weight_decay": 0.1}]
            self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            of_group = [lambda k: 1.0 / (1 + k), lambda k: 1.0 + k]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, of_group)
            return self.lr_scheduler

    return Mine, {}, {}


def some_parameters(kind):
    """The optimizer has the layers alone; the norm that clips is that of all gradients."""

    class Mine(kind):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.AdamW(self.model.model.layers.parameters(), lr=1e-2)
            return self.optimizer

    return Mine, {}, {"max_grad_norm": 0.3}


def plateau(kind):
    return kind, {}, {
        "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0},
        "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip


def own_step(kind):
    class Mine(kind):
        seen = []

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, {**inputs, "labels": inputs["labels"] // 2}, num_items_in_batch)
            self.seen.append(float(loss))
            return 2 * loss

    return Mine, {}, {}


def callback(kind):
    class Writes(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + state.global_step)

    return kind, {"callbacks": [Writes()]}, {}


def train(library, case, folder):
    kind, given, more = case(library.Trainer)
    args = library.TrainingArguments(**options(folder, **more))
    trainer = kind(model=build(), args=args, train_dataset=rows(), eval_dataset=rows(4), **given)
    trainer.train()
    return trainer


@pytest.mark.part(case=[optimizer_and_scheduler])
@pytest.mark.parametrize("case", [optimizer_and_scheduler, some_parameters, plateau, own_step, callback])
def test_what_a_script_makes_counts(tmp_path, case):
    plain, mine = (train(library, case, tmp_path) for library in (transformers, ours))
    np.testing.assert_allclose(logged(mine, "loss"), logged(plain, "loss"), rtol=1e-6)
    np.testing.assert_allclose(logged(mine, "learning_rate"), logged(plain, "learning_rate"), rtol=1e-12)
    np.testing.assert_allclose(logged(mine, "grad_norm"), logged(plain, "grad_norm"), rtol=2e-5)
    if case is plateau:
        assert len({x for (x,) in logged(plain, "learning_rate")}) > 2
    if case is own_step:
        np.testing.assert_allclose(mine.seen, plain.seen, rtol=1e-6)
        assert len(mine.seen) == 5


@pytest.mark.whole
def test_what_is_passed_counts_and_goes_on_from_a_checkpoint(tmp_path):
    """A scheduler that follows metrics and a callback's rate are in the checkpoint."""

    def run(library, resume=None):
        model = build()
        adam = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.9))
        falling = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0, threshold=10.0)
        more = {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "max_steps": 6,
            "metric_for_best_model": "loss",
        }
        args = library.TrainingArguments(**options(tmp_path / library.__name__, **more))
        given = {"train_dataset": rows(), "eval_dataset": rows(4), "optimizers": (adam, falling)}
        trainer = library.Trainer(model, args, **given)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    plain, mine = run(transformers), run(ours)
    again = run(ours, str(tmp_path / ours.__name__ / "checkpoint-4"))
    for trainer in (mine, again):
        np.testing.assert_allclose(logged(trainer, "loss"), logged(plain, "loss"), rtol=1e-6)
        assert logged(trainer, "learning_rate") == logged(plain, "learning_rate")
    assert len({x for (x,) in logged(plain, "learning_rate")}) == 3


class Backward(ours.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


class NoStep(ours.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return torch.zeros(())


class Own(torch.optim.SGD):
    pass


class OwnOptimizer(ours.Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = Own(self.model.parameters(), lr=0.1)
        return self.optimizer


class NoOptimizer(ours.Trainer):
    def create_optimizer(self, model=None):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


class UsedOptimizer(ours.Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()
        self.model.zero_grad()


class Clip(ours.Trainer):
    def _clip_grad_norm(self, model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class Wrap(ours.Trainer):
    def _wrap_model(self, model, training=True, dataloader=None):
        return super()._wrap_model(model, training, dataloader)


class Save(ours.Trainer):
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)


class Scale(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.1)


class WithCallback(ours.Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, callbacks=[Scale()], **kwargs)


@pytest.mark.part(kind=[Clip, WithCallback, NoStep, OwnOptimizer, UsedOptimizer])
@pytest.mark.parametrize(
    "kind, sentence",
    [
        (Clip, r"Clip._clip_grad_norm \(line \d+ of .*py\) uses gradients.*max_grad_norm"),
        (Wrap, r"Wrap._wrap_model \(line \d+ of .*py\) would never be called: pass the finished model"),
        (Save, r"Save._save \(line \d+ of .*py\) would never be called: override save_model"),
        (WithCallback, r"Scale.on_pre_optimizer_step \(line \d+ of .*py\) uses gradients.*grad_norm"),
        (Backward, r"Backward.training_step calls backward \(line \d+ of .*py\), but gradients exist inside the"),
        (NoStep, r"an update is due, but super\(\).training_step was not called"),
        (OwnOptimizer, "test_transformers_optimizers.Own has no counterpart.*AdamW"),
        (NoOptimizer, "NoOptimizer.create_optimizer set self.optimizer to NoneType"),
        (UsedOptimizer, "UsedOptimizer.create_optimizer: the optimizer already has state for 20 parameters"),
    ],
)
def test_steps_that_do_not_count_are_refused(tmp_path, kind, sentence):
    trainer = kind(build(), ours.TrainingArguments(**options(tmp_path)), train_dataset=rows())
    with pytest.raises(ValueError, match=sentence):
        trainer.train()


class Line(nn.Module):
    """A layer, of inputs less a mean that moves: a buffer that `forward` assigns."""

    def __init__(self, seed=0):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        nn.init.normal_(self.layer.weight, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.layer.bias)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x, labels=None):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return {"loss": nn.functional.mse_loss(self.layer(x - self.mean).squeeze(-1), labels)}


def lines():
    return [{"x": x, "labels": x.sum()} for x in torch.randn(16, 4, generator=torch.Generator().manual_seed(1))]


class Clips(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        args.max_grad_norm = {1: 0.01, 2: 0.0}[state.global_step]


def test_another_model_in_its_place_is_trained(tmp_path):
    """With its buffers, those that are assigned in every microbatch, too; and a callback may write what clips."""

    def run(library):
        more = {
            "max_steps": 2,
            "optim": "sgd",
            "lr_scheduler_type": "constant",
            "learning_rate": 0.1,
            "gradient_accumulation_steps": 2,
        }
        args = library.TrainingArguments(**options(tmp_path, **more))
        trainer = library.Trainer(Line(), args, train_dataset=lines(), eval_dataset=lines(), callbacks=[Clips()])
        trainer.train()
        trainer.model, first = Line(1), trainer.model
        before = trainer.evaluate()["eval_loss"]
        if library is ours:
            with pytest.raises(
                ValueError,
                match=r"trainer.optimizer \(None lets a new one be made\): the optimizer's parameter group 0",
            ):
                trainer.train()
        trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler = trainer.model, None, None
        trainer.train()
        values = [x.detach().clone() for model in (first, trainer.model) for x in model.state_dict().values()]
        return [before, *losses(trainer)], values

    (theirs, expected), (mine, values) = run(transformers), run(ours)
    np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
