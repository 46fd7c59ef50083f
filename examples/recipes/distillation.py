"""Distillation: a small student learns from a teacher, whose shards are part of the
state and never change.

python examples/recipes/distillation.py
torchrun --nproc-per-node 2 examples/recipes/distillation.py
"""

import torch
from digits import batches
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import optim


def build(width, seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)
    )


def trained(states, train_step, steps, rows):
    step, losses = zerofn.compile(train_step), []
    for batch in (bar := zerofn.progress(batches(steps, rows))):
        states, metrics = step(states, batch)
        bar.log(metrics)
        losses.append(metrics["loss"])
    return states, [float(x) for x in losses]


def main(steps=100, rows=32, temperature=2.0):
    big, small = (
        zerofn.skeleton(lambda: build(256, 0)),
        zerofn.skeleton(lambda: build(32, 1)),
    )

    def init(width, seed):
        params = lambda: dict(build(width, seed).named_parameters())
        return lambda: zerofn.TrainState.create(params=params(), tx=optim.adamw(3e-3))

    def teach(params, batch):
        return nn.functional.cross_entropy(
            functional_call(big, params, (batch["x"],)), batch["y"]
        )

    def teacher_step(state, batch):
        loss, grads = state.value_and_grad(teach)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    def learn(params, batch, wanted):
        found = functional_call(small, params, (batch["x"],)) / temperature
        return nn.functional.kl_div(
            found.log_softmax(-1), wanted, reduction="batchmean"
        )

    def student_step(states, batch):
        with torch.no_grad():
            logits = functional_call(
                big, zerofn.gather(states["teacher"]), (batch["x"],)
            )
        student = states["student"]
        loss, grads = student.value_and_grad(learn)(
            batch, (logits / temperature).softmax(-1)
        )
        return {
            "student": student.apply_gradients(grads),
            "teacher": states["teacher"],
        }, {"loss": loss}

    teacher, _ = trained(zerofn.shard(init(256, 0)), teacher_step, steps, rows)
    states = {"student": zerofn.shard(init(32, 1)), "teacher": teacher.params}
    return trained(states, student_step, steps, rows)[1]


if __name__ == "__main__":
    main()
