"""Diffusion: a small UNet learns to predict the noise in images. Times and noise are
drawn from the step's key.

python examples/recipes/diffusion.py
torchrun --nproc-per-node 2 examples/recipes/diffusion.py
"""

import torch
from digits import batches
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import optim

TIMES = 50
# how much of the image's variance is left
KEPT = torch.cumprod(1 - torch.linspace(1e-3, 0.2, TIMES), 0)


class UNet(nn.Module):
    """Convolutions down to 4 x 4 and up again, with the time added in the middle."""

    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Embedding(TIMES, 2 * width)
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x, t):
        a = torch.relu(self.first(x))
        b = torch.relu(self.down(a) + self.time(t)[:, :, None, None])
        b = torch.relu(self.up(torch.relu(self.middle(b)) + b))
        return self.last(torch.cat([a, b], 1))


def build():
    torch.manual_seed(0)
    return UNet()


def main(steps=200, rows=64):
    model = zerofn.skeleton(build)

    def init_state():
        return zerofn.TrainState.create(
            params=dict(build().named_parameters()), tx=optim.adamw(2e-3)
        )

    def loss_fn(params, batch):
        x = batch["x"]
        t = torch.randint(0, TIMES, (len(x),))
        noise, kept = torch.randn_like(x), KEPT[t][:, None, None, None]
        return nn.functional.mse_loss(
            functional_call(
                model, params, (kept.sqrt() * x + (1 - kept).sqrt() * noise, t)
            ),
            noise,
        )

    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    def denoise(params, batch):
        """Take the noise that the model sees at time t out of x, down to time t - 1."""
        x, t = batch["x"], batch["t"]
        with torch.no_grad():
            noise = functional_call(model, zerofn.gather(params), (x, t.expand(len(x))))
        now, before = (
            KEPT.take(t),
            torch.where(t > 0, KEPT.take((t - 1).clamp(min=0)), 1.0),
        )
        clean = ((x - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1, 1)
        return before.sqrt() * clean + (1 - before).sqrt() * noise

    state = zerofn.shard(init_state)
    step, back, losses = zerofn.compile(train_step), zerofn.compile(denoise), []
    for batch in (bar := zerofn.progress(batches(steps, rows))):
        state, metrics = step(state, batch)
        bar.log(metrics, state)
        losses.append(metrics["loss"])
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for t in reversed(range(TIMES)):
        x = back(state.params, {"x": x, "t": torch.tensor(t)})
    for line in torch.cat(list(x[:, 0]), 1):
        print("".join(" .:*#"[int((v + 1) * 2.49)] * 2 for v in line.clamp(-1, 1)))
    return [float(x) for x in losses]


if __name__ == "__main__":
    main()
