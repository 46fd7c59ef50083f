"""torch's optimizers, translated: the same parameters after some steps."""

import pytest
import torch
import transformers

import zerofn
from zerofn import optim
from zerofn.integrations.torch_optimizers import translated

CASES = [
    ("AdamW", {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "fused": True}),
    ("AdamW", {}),
    ("Adam", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("Adagrad", {"initial_accumulator_value": 0.3, "eps": 1e-3}),
    ("RMSprop", {"momentum": 0.5, "centered": True, "weight_decay": 0.1}),
]


def follow(theirs, plain, tx, first, atol):
    """Four updates of both; the parameters are equal after each."""
    state = tx.init(first)
    for step in range(4):
        grads = {k: torch.sin(x.detach() + step) for k, x in plain.items()}
        for k, x in plain.items():
            x.grad = grads[k].clone()
        theirs.step()
        updates, state = tx.update(grads, state, first)
        first = optim.apply_updates(first, updates)
        for k, x in plain.items():
            torch.testing.assert_close(first[k], x.detach(), rtol=2e-6, atol=atol)
    return first


@pytest.mark.parametrize("name, options", CASES)
def test_updates_of_torchs_optimizers_and_groups_are_torchs(name, options):
    draw = torch.Generator().manual_seed(0)
    first = {"w": torch.randn(5, 3, generator=draw), "b": torch.randn(3, generator=draw)}
    plain = {k: x.clone().requires_grad_() for k, x in first.items()}
    decay = options.get("weight_decay", 1e-2 if name == "AdamW" else 0.0)
    groups = [{"params": [plain["w"]], "weight_decay": decay}, {"params": [plain["b"]], "weight_decay": 0.0}]
    kinds = {k: v for k, v in options.items() if k != "fused"}
    theirs = getattr(torch.optim, name)(groups, lr=0.05, **kinds)
    tx = translated(getattr(torch.optim, name), options, 0.05, lambda leaf: leaf.name == "w")
    first = follow(theirs, plain, tx, first, atol=1e-7)
    assert zerofn.tree_map(torch.isfinite, first)["w"].all()


def test_transformers_adafactor():
    draw = torch.Generator().manual_seed(0)
    first = {"w": torch.randn(5, 3, generator=draw), "b": torch.randn(3, generator=draw)}
    plain = {k: x.clone().requires_grad_() for k, x in first.items()}
    fixed = {"scale_parameter": False, "relative_step": False}
    groups = [{"params": [plain["w"]], "weight_decay": 0.1}, {"params": [plain["b"]], "weight_decay": 0.0}]
    theirs = transformers.Adafactor(groups, lr=0.05, **fixed)
    tx = translated(transformers.Adafactor, {**fixed, "weight_decay": 0.1}, 0.05, lambda leaf: leaf.name == "w")
    follow(theirs, plain, tx, first, atol=1e-6)


@pytest.mark.parametrize(
    "kind, options, sentence",
    [
        (
            torch.optim.LBFGS,
            {},
            r"LBFGS has no counterpart in zerofn.optim. ZeroFn translates these .* AdamW \(betas, eps",
        ),
        (type("AdamW", (torch.optim.AdamW,), {}), {}, "test_torch_optimizers.AdamW has no counterpart"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True has no counterpart"),
        (transformers.Adafactor, {"scale_parameter": False}, "scale_parameter and relative_step must be False"),
        (torch.optim.SGD, {"dampening": 0.1}, "dampening=0.1 has no counterpart"),
        (torch.optim.SGD, {"betas": (0.1, 0.2)}, "has no counterpart. Leave it out; the known arguments are momentum"),
    ],
)
def test_what_has_no_counterpart_is_a_sentence(kind, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        translated(kind, options, 0.1)
