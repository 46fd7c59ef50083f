"""Policy gradient (REINFORCE): the policy sees a digit, draws a label, and learns only
whether it was right.

python examples/recipes/policy.py
torchrun --nproc-per-node 2 examples/recipes/policy.py
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


def main(steps=300, rows=64):
    model = zerofn.skeleton(build)

    def init_state():
        params = dict(build().named_parameters())
        return zerofn.TrainState.create(
            params=params, tx=optim.adamw(3e-3), extra={"usual": torch.tensor(0.1)}
        )

    def loss_fn(params, batch, usual):
        logits = functional_call(model, params, (batch["x"],)).log_softmax(-1)
        # drawn from the step's key: another draw on each rank
        action = torch.multinomial(logits.detach().exp(), 1)
        reward = (action[:, 0] == batch["y"]).float()
        loss = -((reward - usual) * logits.gather(1, action)[:, 0]).mean()
        return loss, reward.mean()

    def train_step(state, batch):
        usual = state.extra["usual"]
        (_, reward), grads = state.value_and_grad(loss_fn, has_aux=True)(batch, usual)
        # Each rank's own reward goes into replicated state, which is averaged.
        new = state.apply_gradients(
            grads, extra={"usual": torch.lerp(usual, reward, 0.1)}
        )
        return new, {"reward": zerofn.collectives.mean(reward)}

    state = zerofn.shard(init_state)
    step, missed = zerofn.compile(train_step), []
    for batch in (bar := zerofn.progress(batches(steps, rows))):
        state, metrics = step(state, batch)
        bar.log(metrics, state)
        missed.append(1 - metrics["reward"])
    return [float(x) for x in missed]


if __name__ == "__main__":
    main()
