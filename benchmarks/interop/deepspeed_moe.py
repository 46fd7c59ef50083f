""".venv-peers/bin/python -m benchmarks.interop.deepspeed_moe: what DeepSpeed's gates and its MoE layer compute.

The gates of `deepspeed.moe.sharded_moe` on some logits, with the noise that they drew, and whole layers of
`deepspeed.moe.layer` with their gradients: numbers for results/deepspeed_moe.json.
`tests/interop/test_deepspeed_moe.py` gives the same inputs to `zerofn.moe`, and compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RESULT = Path(__file__).parents[1] / "results" / "deepspeed_moe.json"
TOKENS, EXPERTS, WIDTH, HIDDEN = 14, 4, 6, 5

# name -> (k, arguments of DeepSpeed's gate). Without random token selection it lets topk choose among equal numbers,
# so that a gate for one expert that drops tokens is compared with it alone.
GATES: dict[str, tuple[int, dict[str, Any]]] = {
    "top 1, random tokens": (1, {"capacity_factor": 1.0, "min_capacity": 2}),
    "top 1, random tokens, few": (1, {"capacity_factor": 0.5, "min_capacity": 0}),
    "top 1, RSample": (1, {"capacity_factor": 1.25, "min_capacity": 4, "noisy_gate_policy": "RSample"}),
    "top 1, nothing dropped": (1, {"capacity_factor": 1.0, "min_capacity": 0, "drop_tokens": False, "use_rts": False}),
    "top 2": (2, {"capacity_factor": 1.0, "min_capacity": 0, "top2_2nd_expert_sampling": False}),
    "top 2, few": (2, {"capacity_factor": 0.5, "min_capacity": 1, "top2_2nd_expert_sampling": False}),
    "top 2, second sampled": (2, {"capacity_factor": 0.75, "min_capacity": 2, "top2_2nd_expert_sampling": True}),
    "top 2, nothing dropped": (2, {"capacity_factor": 1.0, "min_capacity": 0, "drop_tokens": False}),
    "top 3, probable": (3, {"capacity_factor": 0.75, "min_capacity": 0, "drop_policy": "probs"}),
    "top 3, in order": (3, {"capacity_factor": 0.75, "min_capacity": 0, "drop_policy": "position"}),
    "top 3, nothing dropped": (3, {"capacity_factor": 1.0, "min_capacity": 0, "drop_tokens": False}),
}
LAYERS: dict[str, dict[str, Any]] = {
    "top 1": {"k": 1, "drop_tokens": False, "use_rts": False},
    "top 1, residual": {"k": 1, "drop_tokens": False, "use_rts": False, "use_residual": True},
    "top 2": {"k": 2, "capacity_factor": 0.5, "min_capacity": 1, "top2_2nd_expert_sampling": False},
    "top 3": {"k": 3, "capacity_factor": 0.75, "min_capacity": 1},
}


def logits() -> Tensor:
    """Return the logits of all gates, [TOKENS, EXPERTS]."""
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2)) * 1.5


def tokens() -> Tensor:
    """Return the input of all layers, [2, TOKENS / 2, WIDTH]."""
    return torch.randn(2, TOKENS // 2, WIDTH, generator=torch.Generator().manual_seed(4))


def params_of(residual: bool) -> dict[str, Tensor]:
    """Return the parameters of a layer by our names: a gate, experts of two matrices, and the residual's."""
    draw = torch.Generator().manual_seed(6)
    shapes = {"gate": (EXPERTS, WIDTH), "up": (EXPERTS, HIDDEN, WIDTH), "down": (EXPERTS, WIDTH, HIDDEN)}
    if residual:
        shapes |= {"mlp.up": (HIDDEN, WIDTH), "mlp.down": (WIDTH, HIDDEN), "weight": (2, WIDTH), "bias": (2,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def keeping(drawn: list[Any], draw: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Return a source of noise that notes what it gives."""

    def found(shape: Any) -> Tensor:
        x = draw(shape)
        drawn.append(x.tolist())
        return x

    return found


def gate(name: str) -> dict[str, Any]:
    """Return what one of DeepSpeed's gates gives."""
    from deepspeed.moe import sharded_moe

    k, options = GATES[name]
    device, gumbels, uniforms = torch.device("cpu"), list[Any](), list[Any]()
    draw = torch.Generator().manual_seed(9)
    tiny = torch.finfo(torch.float32).tiny
    sharded_moe.gumbel_map[device] = keeping(
        gumbels, lambda shape: -torch.rand(shape, generator=draw).clamp_min(tiny).log().neg().log()
    )
    sharded_moe.exp_selection_uniform_map[device] = keeping(uniforms, lambda shape: torch.rand(shape, generator=draw))
    x = logits()
    if k == 1:
        found = sharded_moe.top1gating(x, **options)
    elif k == 2:
        found = sharded_moe.top2gating(x, **options)
    else:
        found = sharded_moe.topkgating(x, k, **options)
    loss, combine, mask, counts = found
    assert torch.equal(combine.bool(), mask)
    return {
        "balance": loss.item(),
        "weights": combine.sum(-1).tolist(),
        "places": combine.shape[-1],
        "counts": counts.tolist(),
        "gumbel": gumbels,
        "uniform": uniforms,
    }


class Expert(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., WIDTH] -> [..., WIDTH]."""
        return self.down(torch.tanh(self.up(x)))


def layer(name: str) -> dict[str, Any]:
    """Return what a whole layer gives, and the gradients of the mean square of its output plus its own loss."""
    from deepspeed.moe.layer import MoE

    options = LAYERS[name]
    module = MoE(WIDTH, Expert(), EXPERTS, **options)
    residual = options.get("use_residual", False)
    params, inner = params_of(residual), module.deepspeed_moe
    theirs: dict[str, list[nn.Parameter]] = {
        "gate": [inner.gate.wg.weight],
        "up": [x.up.weight for x in inner.experts.deepspeed_experts],
        "down": [x.down.weight for x in inner.experts.deepspeed_experts],
    }
    if residual:
        theirs |= {"mlp.up": [module.mlp.up.weight], "mlp.down": [module.mlp.down.weight]}
        theirs |= {"weight": [module.coefficient.weight], "bias": [module.coefficient.bias]}
    with torch.no_grad():
        for key, found in theirs.items():
            values = params[key] if key in ("up", "down") else params[key].unsqueeze(0)
            for p, value in zip(found, values, strict=True):
                p.copy_(value)
    y, balance, counts = module(tokens())
    (y.square().mean() + balance).backward()
    grads = {key: torch.stack([p.grad for p in found if p.grad is not None]) for key, found in theirs.items()}
    return {
        "y": y.tolist(),
        "balance": balance.item(),
        "counts": counts.tolist(),
        "grads": {key: (x if key in ("up", "down") else x[0]).tolist() for key, x in grads.items()},
    }


def main() -> None:
    """Write results/deepspeed_moe.json."""
    import deepspeed

    found = {
        "deepspeed": deepspeed.__version__,
        "gates": {name: gate(name) for name in GATES},
        "layers": {name: layer(name) for name in LAYERS},
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(f"deepspeed {found['deepspeed']}: {len(GATES)} gates and {len(LAYERS)} layers in {RESULT.name}")


if __name__ == "__main__":
    main()
