"""A mixture-of-experts layer in plain torch: one process, all experts, a loop over tokens. Nothing of `zerofn.moe`."""

from __future__ import annotations

import math

import torch


def expert(p, row):
    """One expert: [d] -> [d], smooth, with a bias that empty rows would show."""
    return torch.tanh(row @ p["up"] + p["bias"]) @ p["down"]


def make_params(num_experts, width, hidden=4, residual=False, seed=3):
    draw = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64) / 2

    def mlp(*lead):
        return {"up": leaf(*lead, width, hidden), "bias": leaf(*lead, hidden), "down": leaf(*lead, hidden, width)}

    params = {"gate": leaf(num_experts, width) * 3, "experts": mlp(num_experts)}
    if residual:
        params |= {"mlp": mlp(), "coefficient": {"weight": leaf(2, width), "bias": leaf(2)}}
    return params


def places(num_tokens, num_experts, k, capacity, min_capacity):
    """As many thousandths as were written, in integers."""
    if capacity is None:
        return num_tokens
    return max(-(-round(capacity * 1000) * k * num_tokens // (1000 * num_experts)), min_capacity)


def chosen(logits, k, noise, noisy_first):
    """The experts of each token, the most wanted first."""
    out = []
    for s in range(len(logits)):
        scores = (logits[s] + (0 if noise is None else noise[s])).tolist()
        first = max(range(len(scores)), key=logits[s].tolist().__getitem__)
        if noise is not None and not noisy_first:
            scores[first] = math.inf
        out.append(sorted(range(len(scores)), key=lambda e: -scores[e])[:k])
    return out


def in_order(experts, gates, priority, k):
    """The choices (choice, token) in the order in which they get places."""
    tokens = range(len(experts))
    if isinstance(priority, torch.Tensor):
        return sorted(((c, s) for c in range(k) for s in tokens), key=lambda x: -priority[x].item())
    if priority == "choice":
        return [(c, s) for c in range(k) for s in tokens]
    if priority == "position":
        return [(c, s) for s in tokens for c in range(k)]
    return sorted(((c, s) for c in range(k) for s in tokens), key=lambda x: -gates[x[1], experts[x[1]][x[0]]].item())


def plain_route(
    logits,
    k,
    *,
    capacity=1.0,
    min_capacity=4,
    priority="choice",
    noise=None,
    noisy_first=True,
    normalize=None,
    used=None,
):
    """For each token {expert: weight} of what is kept, the choices [S][k], and the counts of experts."""
    num_tokens, num_experts = logits.shape
    gates = logits.softmax(-1)
    experts = chosen(logits, k, noise, noisy_first)
    room = [places(num_tokens, num_experts, k, capacity, min_capacity)] * num_experts
    counts, kept = [0] * num_experts, [{} for _ in range(num_tokens)]
    for c, s in in_order(experts, gates, priority, k):
        if used is not None and not used[s]:
            continue
        e = experts[s][c]
        counts[e] += 1
        if room[e]:
            room[e] -= 1
            kept[s][e] = gates[s, e]
    if k > 1 if normalize is None else normalize:
        kept = [{e: w / sum(mine.values()) for e, w in mine.items()} for mine in kept]
    return kept, experts, counts


def plain_balance(logits, experts, num_first, used=None):
    """The load-balance loss of the first choices of some tokens."""
    num_tokens, num_experts = logits.shape
    share = torch.zeros(num_experts, dtype=logits.dtype)
    for s, mine in enumerate(experts):
        for e in mine[:num_first]:
            share[e] += (used is None or bool(used[s])) / (num_tokens * num_first)
    return num_experts * (logits.softmax(-1).mean(0) * share).sum()


def plain_layer(params, x, k, *, balance="all", into=None, used=None, **options):
    """(y, balance, z, counts, dropped) of tokens [S, d]. `into`: the input of the gate, where it is another one."""
    logits = (x if into is None else into) @ params["gate"].t()
    kept, experts, counts = plain_route(logits, k, used=used, **options)
    rows = []
    for s, mine in enumerate(kept):
        row = torch.zeros_like(x[s])
        for e, weight in mine.items():
            row = row + weight * expert({name: p[e] for name, p in params["experts"].items()}, x[s])
        rows.append(row)
    y = torch.stack(rows)
    if "mlp" in params:
        mixed = (x @ params["coefficient"]["weight"].t() + params["coefficient"]["bias"]).softmax(-1)
        dense = torch.stack([expert(params["mlp"], row) for row in x])
        y = y * mixed[:, :1] + dense * mixed[:, 1:]
    even = plain_balance(logits, experts, 1 if balance == "first" else k, used)
    dropped = sum(counts) - sum(map(len, kept))
    return y, even, logits.exp().sum(-1).log().pow(2).mean(), counts, dropped
