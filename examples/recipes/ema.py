"""EMA: a moving average of the weights, sharded like the weights, and an evaluation
that uses the average.

python examples/recipes/ema.py
torchrun --nproc-per-node 2 examples/recipes/ema.py
"""

import torch
from digits import batches
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import optim


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def main(steps=100, rows=32):
    model = zerofn.skeleton(build)

    def init_state():
        params = dict(build().named_parameters())
        # the same structure as the parameters
        average = {name: p.detach().clone() for name, p in params.items()}
        return zerofn.TrainState.create(
            params=params, tx=optim.adamw(3e-3), extra=average
        )

    def loss_fn(params, batch):
        return nn.functional.cross_entropy(
            functional_call(model, params, (batch["x"],)), batch["y"]
        )

    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)

        def average(params):
            return zerofn.tree_map(
                lambda a, p: torch.lerp(a, p, 0.02), state.extra, params
            )

        return state.apply_gradients(grads, extra=average), {"loss": loss}

    def accuracy(params, batch):
        """The share of right answers in all ranks' batches."""
        with torch.no_grad():
            found = functional_call(model, zerofn.gather(params), (batch["x"],)).argmax(
                -1
            )
            right = (found == batch["y"]).float().mean()
            return zerofn.collectives.mean(right, like=params)

    state = zerofn.shard(init_state)
    step, evaluate, losses = zerofn.compile(train_step), zerofn.compile(accuracy), []
    for batch in (bar := zerofn.progress(batches(steps, rows))):
        state, metrics = step(state, batch)
        bar.log(metrics, state)
        losses.append(metrics["loss"])
    held_out = next(batches(1, 256))
    print(f"accuracy of the weights {evaluate(state.params, held_out):.3f}, ", end="")
    print(f"of their average {evaluate(state.extra, held_out):.3f}")
    return [float(x) for x in losses]


if __name__ == "__main__":
    main()
