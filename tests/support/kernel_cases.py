"""Shards, moments and runs for the tests of the CPU kernels."""

import itertools

import pytest
import torch

from zerofn.ops import adamw, cpu, frozen_adamw, lion, sgd  # noqa: F401 - the rules are declared there

HYPER = {
    "adamw": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
    "adam": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
    "lion": {"b1": 0.9, "b2": 0.99},
    "sgd": {},
    "sgd_momentum": {"b1": 0.9, "nesterov": True},
}
NUM_MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0, "sgd_momentum": 1}
MASTERS = ("fp32", "split")
MOMENTS = ("fp32", "bf16", "8-bit")
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
# Each with gaps, one of them inside a block of 256 and one over several; ends at odd places.
RUNS = [(0, 1003), (1003, 1007), (1010, 2560), (3333, 4099)]
SIZE = 4100
COMBINATIONS = [
    (rule, master, moment, gradient)
    for rule, master, moment, gradient in itertools.product(HYPER, MASTERS, MOMENTS, GRADIENTS)
    if NUM_MOMENTS[rule] or moment == "fp32"
]


def wild(size, seed, scale=1.0):
    """fp32 [size] over many octaves, with zeros, denormals and huge values among them."""
    rng = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(size, generator=rng) * torch.exp(3 * torch.randn(size, generator=rng))
    x[::97] = 0.0
    x[5::131] *= 1e-42
    x[7::1031] *= 1e12
    return x


def shard(rule, master, moment, gradient, size=SIZE, seed=0):
    """(p, g, moments) as `update_` takes them."""
    p, g = wild(size, seed), wild(size, seed + 1).clamp(-6e4, 6e4).to(gradient)
    decoded = [wild(size, seed + 2), wild(size, seed + 3).square().clamp(max=1e30)][: NUM_MOMENTS[rule]]
    stored = {
        "fp32": lambda x, signed: [x.clone()],
        "bf16": lambda x, signed: [x.bfloat16()],
        "8-bit": lambda x, signed: list(cpu.encode(x, signed)),
    }[moment]
    return ([p] if master == "fp32" else list(cpu.split(p))), g, [stored(x, i == 0) for i, x in enumerate(decoded)]


def copies(p, g, moments):
    """The same shards in memory of their own."""
    return [x.clone() for x in p], g, [[x.clone() for x in moment] for moment in moments]


def options(rule, runs=RUNS, factors=(0.5, 0.3), count=3):
    """The other arguments: every run has a rate and a decay of its own."""
    return {
        "starts": [a for a, _ in runs],
        "stops": [b for _, b in runs],
        "rates": [1e-2 * (i + 1) for i in range(len(runs))],
        "decays": [0.1 * (i % 3) for i in range(len(runs))],
        "factors": factors,
        "hyper": HYPER[rule],
        "count": count,
        "offset": 4096,
    }


def tensors(p, moments):
    """Everything an update writes."""
    return [*p, *(x for moment in moments for x in moment)]


def same_bits(a, b):
    """Whether two tensors are equal bit for bit, any NaN being like another."""
    if a.dtype.is_floating_point:
        a, b = (
            a.nan_to_num(nan=123.0, posinf=torch.inf, neginf=-torch.inf),
            b.nan_to_num(nan=123.0, posinf=torch.inf, neginf=-torch.inf),
        )
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def odd_address(x):
    """A copy of `x` whose memory starts at an odd multiple of its element's size."""
    return torch.cat([x[:1], x])[1:]


# Of a file of tests: a test that takes `isa` runs once on each instruction set, or in torch's operations without the
# library. The file names both.
each_isa = pytest.mark.parametrize("isa", cpu.isas() or ["torch"])


@pytest.fixture(autouse=True)
def chosen(request, monkeypatch):
    isa = request.node.callspec.params.get("isa") if hasattr(request.node, "callspec") else None
    if isa and isa != "torch":
        monkeypatch.setenv("ZEROFN_ISA", isa)
