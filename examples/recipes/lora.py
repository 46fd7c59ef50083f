"""LoRA: a frozen, sharded base model and small trained matrices. Only the small
matrices have gradients and moments.

python examples/recipes/lora.py
torchrun --nproc-per-node 2 examples/recipes/lora.py
"""

import torch
from digits import batches
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import optim


class LoRA(nn.Module):
    """A linear layer, and a low-rank one beside it, which begins at zero."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(
            torch.randn(rank, base.in_features) / base.in_features**0.5
        )
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def build():
    torch.manual_seed(0)
    linear = [nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)]
    first, second, head = (LoRA(x) for x in linear)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), head)


def trained(state, model, steps, rows, sign):
    """Train; with `sign` -1 on negatives of the images."""

    def loss_fn(params, batch):
        return nn.functional.cross_entropy(
            functional_call(model, params, (sign * batch["x"],)), batch["y"]
        )

    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    step, losses = zerofn.compile(train_step), []
    for batch in (bar := zerofn.progress(batches(steps, rows))):
        state, metrics = step(state, batch)
        bar.log(metrics, state)
        losses.append(metrics["loss"])
    return state, [float(x) for x in losses]


def main(steps=100, rows=32):
    model = zerofn.skeleton(build)

    def base():
        """The base learns, as if downloaded; the matrices stay as they are."""
        params = dict(build().named_parameters())
        return zerofn.TrainState.create(
            params=params, tx=optim.adamw(3e-3), frozen=lambda name: "lora" in name
        )

    pretrained, _ = trained(zerofn.shard(base), model, steps, rows, sign=1)
    # of a large model: load_safetensors, which reads each rank's part
    params = zerofn.unshard(pretrained.params)

    def adapted():
        return zerofn.TrainState.create(
            params=params, tx=optim.adamw(3e-3), frozen=lambda name: "lora" not in name
        )

    state, losses = trained(zerofn.shard(adapted), model, steps, rows, sign=-1)
    print(state)
    return losses


if __name__ == "__main__":
    main()
