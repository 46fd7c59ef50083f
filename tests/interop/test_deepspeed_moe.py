"""DeepSpeed's gates and layers by `zerofn.moe`. benchmarks/interop/deepspeed_moe.py has written what DeepSpeed does."""

import json

import pytest
import torch

import zerofn
from benchmarks.interop.deepspeed_moe import EXPERTS, GATES, LAYERS, RESULT, TOKENS, logits, params_of, tokens

THEIRS = json.loads(RESULT.read_text())
CLOSE = {"rtol": 2e-6, "atol": 2e-7}  # of float32, in which DeepSpeed's gates compute


def ours(k, options):
    """DeepSpeed's options, and its defaults, in our words."""
    dropping = options.get("drop_tokens", True)
    found = {"capacity": options.get("capacity_factor", 1.0) if dropping else None}
    if dropping:
        found["min_capacity"] = options.get("min_capacity", 4)
    found["priority"] = "choice" if k < 3 or options.get("drop_policy") == "position" else "probability"
    if options.get("drop_policy") == "position":
        found["priority"] = "position"
    return found


@pytest.mark.parametrize("name", GATES)
def test_gates(name):
    k, options = GATES[name]
    theirs, found, x = THEIRS["gates"][name], ours(k, options), logits()
    if theirs["gumbel"]:
        found |= {"noise": torch.tensor(theirs["gumbel"][0]), "noisy_first": k == 1}
    if theirs["uniform"]:  # a number for each token and expert; that of the chosen one counts
        drawn = torch.tensor(theirs["uniform"][0])
        chosen = zerofn.moe.route(x, 1, **found).expert
        found["priority"] = drawn.gather(1, chosen.t()).t()
    mine = zerofn.moe.route(x, k, **found)
    weights = torch.zeros(TOKENS, EXPERTS).scatter_add(1, mine.expert.t(), mine.weight.t())
    expected = torch.tensor(theirs["weights"])
    assert torch.equal(weights > 0, expected > 0)  # the same tokens are dropped
    torch.testing.assert_close(weights, expected, **CLOSE)
    assert mine.counts.tolist() == theirs["counts"]
    if options.get("drop_tokens", True):
        assert mine.capacity == min(theirs["places"], TOKENS)
    else:  # theirs asks the host for the largest number that came; ours has room for the worst case
        assert mine.capacity == TOKENS and mine.dropped == 0
    balance = zerofn.moe.load_balance_loss(x, mine.expert[: 1 if k <= 2 else k])
    assert balance.item() == pytest.approx(theirs["balance"], rel=2e-6)


def test_some_gates_drop():
    dropping = [
        name for name, x in THEIRS["gates"].items() if (torch.tensor(x["weights"]) > 0).sum() < sum(x["counts"])
    ]
    assert len(dropping) >= 5


def expert(p, rows):
    return torch.tanh(rows @ p["up"].t()) @ p["down"].t()


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    options = LAYERS[name]
    k, theirs = options["k"], THEIRS["layers"][name]
    flat = {key: x.requires_grad_() for key, x in params_of(options.get("use_residual", False)).items()}
    params = {"gate": flat["gate"], "experts": {"up": flat["up"], "down": flat["down"]}}
    if "mlp.up" in flat:
        params["mlp"] = {"up": flat["mlp.up"], "down": flat["mlp.down"]}
        params["coefficient"] = {"weight": flat["weight"], "bias": flat["bias"]}
    y, aux = zerofn.moe.layer(
        params, tokens(), torch.vmap(expert), k=k, balance="first" if k <= 2 else "all", **ours(k, options)
    )
    torch.testing.assert_close(y, torch.tensor(theirs["y"]), rtol=1e-5, atol=1e-6)
    assert aux.balance.item() == pytest.approx(theirs["balance"], rel=2e-6)
    assert aux.counts.tolist() == theirs["counts"]
    (y.square().mean() + aux.balance).backward()
    for key, x in flat.items():
        torch.testing.assert_close(x.grad, torch.tensor(theirs["grads"][key]), rtol=1e-4, atol=1e-6, msg=key)
