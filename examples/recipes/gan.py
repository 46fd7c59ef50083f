"""A GAN: two states, updated in one step. Noise is drawn from the step's key, and
differs between ranks.

python examples/recipes/gan.py
torchrun --nproc-per-node 2 examples/recipes/gan.py
"""

import torch
from digits import batches
from torch import nn
from torch.func import functional_call
from torch.nn.functional import softplus

import zerofn
from zerofn import optim

NOISE = 16


def build_generator():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(NOISE, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Tanh(),
        nn.Unflatten(1, (1, 8, 8)),
    )


def build_critic():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)
    )


def main(steps=200, rows=64):
    generator, critic = zerofn.skeleton(build_generator), zerofn.skeleton(build_critic)

    def init(build):
        tx = optim.adam(1e-3, b1=0.5)
        return lambda: zerofn.TrainState.create(
            params=dict(build().named_parameters()), tx=tx
        )

    def critic_loss(params, generated, real):
        fake = functional_call(critic, params, (generated,))
        return (
            softplus(fake) + softplus(-functional_call(critic, params, (real,)))
        ).mean()

    def generator_loss(params, critic_params, rows):
        images = functional_call(generator, params, (torch.randn(rows, NOISE),))
        return softplus(
            -functional_call(critic, critic_params, (images,))
        ).mean(), images.detach()

    def train_step(states, batch):
        g, c = states["generator"], states["critic"]
        # The critic's parameters are gathered once: constants of this loss, and
        # variables of the next.
        vg = g.value_and_grad(generator_loss, has_aux=True)
        (g_loss, images), g_grads = vg(zerofn.gather(c.params), batch["x"].shape[0])
        c_loss, c_grads = c.value_and_grad(critic_loss)(images, batch["x"])
        new = {
            "generator": g.apply_gradients(g_grads),
            "critic": c.apply_gradients(c_grads),
        }
        return new, {"loss": c_loss, "generator": g_loss}

    states = {
        "generator": zerofn.shard(init(build_generator)),
        "critic": zerofn.shard(init(build_critic)),
    }
    step, losses = zerofn.compile(train_step), []
    for batch in (bar := zerofn.progress(batches(steps, rows))):
        states, metrics = step(states, batch)
        bar.log(metrics, states["critic"])
        losses.append(metrics["loss"])
    return [float(x) for x in losses]


if __name__ == "__main__":
    main()
