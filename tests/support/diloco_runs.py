"""Runs of `zerofn.diloco` on a small model, and a plain simulation of its replicas in one process."""

import torch
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import optim

EVERY, STEPS = 3, 8
RATE, DECAY = 0.05, 0.1


def build(dtype=torch.float64):
    """Three layers of odd sizes, so that shards and units cross leaves."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 5)).to(dtype)


def rows(step, replica, dtype=torch.float64):
    """A replica's batch, which its ranks share."""
    drawn = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + replica), dtype=torch.float64)
    return {"x": drawn[:, :7].to(dtype), "y": drawn[:, 7:].to(dtype)}


def loss_of(model, params, batch):
    return (functional_call(model, params, (batch["x"],)) - batch["y"]).square().mean()


def simulated(num_replicas, fragments=1, tau=0, mix=0.0, steps=STEPS, every=EVERY, dtype=torch.float64, after=0):
    """One process, plain torch: (losses of each replica, the outer optimizer's parameters, each replica's). While
    replicas train together, each has the loss of all.
    """
    start = {k: p.detach() for k, p in build(dtype).named_parameters()}
    models = [build(dtype) for _ in range(num_replicas)]
    inner = [torch.optim.AdamW(m.parameters(), lr=RATE, weight_decay=DECAY, foreach=False) for m in models]
    anchor = {k: p.clone().requires_grad_() for k, p in start.items()}
    layers = sorted({k.split(".")[0] for k in start})
    parts = [[k for k in start if k.split(".")[0] in layers[f::fragments]] for f in range(fragments)]
    outer = [
        torch.optim.SGD([anchor[k] for k in part], lr=0.7, momentum=0.9, nesterov=True, foreach=False) for part in parts
    ]
    losses, sent = [], {}
    for step in range(1, steps + 1):
        found = []
        for r, model in enumerate(models):
            model.zero_grad()
            loss = loss_of(model, dict(model.named_parameters()), rows(step - 1, r, dtype))
            loss.backward()
            found.append(loss.detach())
        losses.append(torch.stack(found))
        own = [dict(m.named_parameters()) for m in models]
        if step <= after:
            losses[-1] = losses[-1].mean().expand(num_replicas)
            for k in start:
                mean = sum(x[k].grad for x in own) / num_replicas
                for x in own:
                    x[k].grad = mean.clone()
        for optimizer in inner:
            optimizer.step()
        if step <= after:
            for k, p in anchor.items():
                p.data.copy_(own[0][k].detach())
            continue
        for action in ("send", "use") if tau == 0 else ("use", "send"):
            for f, part in enumerate(parts):
                age = step - after - (f + 1) * every // fragments
                if action == "send" and age >= 0 and age % every == 0:
                    sent[f] = {k: sum(anchor[k].detach() - x[k].detach() for x in own) / num_replicas for k in part}
                if action == "use" and age >= tau and (age - tau) % every == 0:
                    for k in part:
                        anchor[k].grad = sent[f][k]
                    outer[f].step()
                    for x in own:
                        for k in part:
                            x[k].data.copy_(mix * x[k].detach() + (1 - mix) * anchor[k].detach())
    each = [{k: p.detach().clone() for k, p in m.named_parameters()} for m in models]
    return torch.stack(losses), {k: p.detach() for k, p in anchor.items()}, each


def unit_of(name):
    return name.split(".")[0]


def started(mesh, stage=3, dtype=torch.float64, every=EVERY, num_steps=0, **options):
    """(step, state)"""
    model = build(dtype)

    def train_step(state, batch):
        loss, grads = state.value_and_grad(lambda params, batch: loss_of(model, params, batch))(batch)
        return state.apply_gradients(grads), loss

    tx = optim.adamw(RATE, weight_decay=DECAY)
    state = zerofn.shard(
        lambda: zerofn.TrainState.create(params=dict(build(dtype).named_parameters()), tx=tx),
        stage=stage, mesh=mesh, unit=unit_of,
    )  # fmt: skip
    step = zerofn.diloco(train_step, every=every, **options)
    return step, step.init(state)


def mine(mesh, step, dtype=torch.float64):
    """This rank's part of its replica's batch."""
    data = mesh.axis("data") if "data" in [x.name for x in mesh.axes] else None
    batch = rows(step, mesh.axis("replicate").rank, dtype)
    return batch if data is None else {k: x.chunk(data.size)[data.rank] for k, x in batch.items()}


def run(mesh, step, state, first=0, last=STEPS, dtype=torch.float64):
    losses = []
    for k in range(first, last):
        state, loss = step(state, mine(mesh, k, dtype))
        losses.append(loss.clone())
    return state, losses


def seen(state):
    """What every rank sees of a state: (the outer optimizer's parameters, each replica's)."""
    own = zerofn.unshard(state.replicas.params)
    num = len(next(iter(own.values())))
    return zerofn.unshard(state.params), [{k: x[r] for k, x in own.items()} for r in range(num)]
