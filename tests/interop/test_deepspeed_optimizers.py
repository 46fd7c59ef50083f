"""Optimizers of a configuration beside torch's, by value."""

import warnings

import pytest
import torch

import zerofn
from zerofn import optim
from zerofn.interop.deepspeed_file import Section
from zerofn.interop.deepspeed_optimizers import optimizer_of

STEPS = 6


def of(kind, moments=None, mask=None, **params):
    return optimizer_of(Section({"optimizer": {"type": kind, "params": params}}, ""), moments, mask)[0]


def trained(tx):
    state = zerofn.TrainState.create(params={"w": start()}, tx=tx)
    for k in range(STEPS):
        state = state.apply_gradients({"w": gradient(k)})
    return state.params["w"]


def torchs(make):
    p = torch.nn.Parameter(start())
    optimizer = make([p])
    for k in range(STEPS):
        p.grad = gradient(k)
        optimizer.step()
    return p.detach()


def start():
    return torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6).clone()


def gradient(k):
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(k))


CASES = [
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    ("adam", {"lr": 0.01, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    (
        "Adam",
        {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False, "betas": [0.8, 0.9], "eps": 1e-6},
        lambda p: torch.optim.Adam(p, 0.01, (0.8, 0.9), 1e-6, weight_decay=0.1),
    ),
    ("Adam", {"adam_w_mode": False}, lambda p: torch.optim.Adam(p, 1e-3)),
    ("Adagrad", {"lr": 0.1, "weight_decay": 0.1}, lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.1)),
    (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.1),
    ),
    ("SGD", {}, lambda p: torch.optim.SGD(p, 1e-3)),
    (
        "RMSprop",
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "centered": True},
        lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, weight_decay=0.1, centered=True),
    ),
]


@pytest.mark.parametrize(("kind", "params", "make"), CASES, ids=lambda x: str(x) if isinstance(x, str | dict) else "")
def test_deepspeeds_optimizers_are_torchs(kind, params, make):
    torch.testing.assert_close(trained(of(kind, **params)), torchs(make), rtol=1e-12, atol=1e-12)


def test_lion_by_hand():
    p, m = start(), torch.zeros(4, 6)
    for k in range(STEPS):
        g = gradient(k)
        p = p - 0.01 * ((0.9 * m + 0.1 * g).sign() + 0.1 * p)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(trained(of("Lion", lr=0.01, weight_decay=0.1)), p, rtol=1e-6, atol=1e-7)


def test_moments_in_a_format():
    assert of("AdamW", "bf16") == optim.adamw(1e-3, 0.9, 0.999, 1e-8, 0.0, moments="bf16")
    with pytest.raises(ValueError, match="bf16_optimizer_states has no effect on Adagrad"):
        of("Adagrad", "bf16")


def test_one_bit_an_element():
    """Local steps have no counterpart: every step sends."""
    adam = of("OneBitAdam", lr=0.01, weight_decay=0.1, freeze_step=400, comm_backend_name="nccl")
    assert adam == optim.onebit_adam(0.01, 0.9, 0.999, 1e-8, 0.1, freeze_step=400)
    with pytest.warns(UserWarning, match="optimizer.params.local_step_scaler has no counterpart"):
        zero = of("ZeroOneAdam", var_freeze_step=50, var_update_scaler=4, local_step_scaler=100)
    assert zero == optim.zero_one_adam(1e-3, var_freeze_step=50, var_update_scaler=4)
    assert of("OneBitLamb", max_coeff=0.3) == optim.onebit_lamb(1e-3, freeze_step=100_000, max_coeff=0.3)


def test_codes_that_a_schedule_never_comes_to_are_told():
    config = {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 400}}}
    for total in (401, 400):
        config["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": total, "warmup_num_steps": 10}}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer_of(Section(config, ""), None)
        found = [str(x.message) for x in told]
        assert ["sends signs from step 400 on, but the scheduler's total_num_steps is 400" in x for x in found] == (
            [True] * (total == 400)
        )


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("OneBitAdam", {"freeze_step": 2.7}, "freeze_step: expected a whole number, got 2.7"),
        ("OneBitAdam", {"max_grad_norm": 1.0}, "max_grad_norm=1.0: write it as gradient_clipping"),
        ("ZeroOneAdam", {"freeze_step": 3}, "freeze_step is not known; did you mean 'var_freeze_step'"),
        ("Muon", {}, "optim.muon"),
        ("Lamb", {}, "optim.lamb"),
        ("Rprop", {}, "'Rprop' has no counterpart; the known types are Adam, AdamW"),
        ("AdamW", {"amsgrad": True}, "amsgrad=True: amsgrad has no counterpart"),
        ("AdamW", {"beta": 0.9}, "params.beta is not known; did you mean 'betas'"),
        ("AdamW", {"betas": 0.9}, "betas: expected two numbers from 0 to 1, got 0.9"),
        ("AdamW", {"lr": "1e-3"}, "params.lr: expected a number, got '1e-3'"),
        ("AdamW", {"max_grad_norm": 1.0}, "max_grad_norm is not known"),
        ("SGD", {"dampening": 0.5}, "dampening has no counterpart"),
    ],
)
def test_what_cannot_be_is_a_sentence(kind, params, message):
    with pytest.raises(ValueError, match=message):
        of(kind, **params)


@pytest.mark.parametrize(
    "kind, more",
    [("AdamW", {}), ("Adam", {"adam_w_mode": False}), ("Lion", {}), ("SGD", {}), ("RMSprop", {}), ("Adagrad", {}),
     ("OneBitAdam", {}), ("ZeroOneAdam", {}), ("OneBitLamb", {})],
)  # fmt: skip
def test_a_mask_says_which_leaves_decay(kind, more):
    slope = gradient(0)

    def both(decay, mask=None):
        tx = of(kind, mask=mask, lr=0.01, weight_decay=decay, **more)
        state = zerofn.TrainState.create(params={"w": start(), "b": start()[0]}, tx=tx)
        _, grads = state.value_and_grad(lambda p: (p["w"] * slope).sum() + (p["b"] * slope[1]).sum())()
        return state.apply_gradients(grads).params

    masked, plain, without = both(0.1, lambda leaf: leaf.ndim >= 2), both(0.1), both(0.0)
    assert torch.equal(masked["w"], plain["w"]) and torch.equal(masked["b"], without["b"])
    assert not torch.equal(plain["b"], without["b"])


def test_a_mask_beside_an_optimizer_of_ones_own_is_refused():
    with pytest.raises(ValueError, match="mask= is for the optimizer of the configuration, but tx= was passed"):
        zerofn.from_deepspeed({}, tx=optim.sgd(0.1), mask=lambda leaf: True)
