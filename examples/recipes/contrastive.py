"""A contrastive loss over the embeddings of all ranks. Two ranks compute the same loss
as one rank with all rows.

python examples/recipes/contrastive.py
torchrun --nproc-per-node 2 examples/recipes/contrastive.py
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
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)
    )


def main(steps=100, rows=32, temperature=0.1):
    model = zerofn.skeleton(build)

    def init_state():
        return zerofn.TrainState.create(
            params=dict(build().named_parameters()), tx=optim.adamw(3e-3)
        )

    def loss_fn(params, batch):
        """Which of all ranks' shifted images is this one? (InfoNCE)"""
        x = batch["x"]
        one, other = (
            nn.functional.normalize(functional_call(model, params, (view,)), dim=-1)
            for view in (x, x.roll(1, dims=3))
        )
        # [ranks * rows, 32]; its gradient goes back to each rank
        everyone = zerofn.collectives.all_gather(other)
        right = torch.arange(len(x)) + zerofn.rank("rows") * len(x)
        return nn.functional.cross_entropy(one @ everyone.T / temperature, right)

    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    state = zerofn.shard(init_state)
    step, losses = zerofn.compile(train_step), []
    for batch in (bar := zerofn.progress(batches(steps, rows))):
        state, metrics = step(state, batch)
        bar.log(metrics, state)
        losses.append(metrics["loss"])
    return [float(x) for x in losses]


if __name__ == "__main__":
    main()
