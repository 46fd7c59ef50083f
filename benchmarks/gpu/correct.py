"""First of gpu.py's parts: the kernels' tests on the GPU, and the bits of every tier against a resident state's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

import zerofn
from zerofn import Offload, optim, tree

ROOT = Path(__file__).resolve().parents[2]
TIERS: list[dict[str, Any]] = [
    *({"optimizer": "cpu", "update": update} for update in ("cpu", "gpu", "split", "auto")),
    *({"optimizer": "cpu", "params": "cpu", "update": update} for update in ("cpu", "gpu")),
    {"params": "cpu"}, {"optimizer": "cpu", "fraction": 0.5}, {"optimizer": "nvme"},
    {"optimizer": "nvme", "params": "nvme"}, {"optimizer": "nvme", "params": "cpu"},
    {"optimizer": "cpu", "params": "nvme"}]  # fmt: skip
RULES = {"clipped": (optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2, weight_decay=0.1)), "skip"),
         "ignoring": (optim.adamw(1e-2, weight_decay=0.1), "ignore"),
         "8-bit": (optim.adamw(1e-2, moments="8bit"), "skip")}  # fmt: skip
WIDTH, LAYERS = 64, 4


def trained(device: str, precision: str, rule: str, offload: Offload | None) -> list[torch.Tensor]:
    """Losses and the whole state after four steps, one of which overflows in fp16; on the host."""
    torch.manual_seed(0)
    layers = [x for _ in range(LAYERS) for x in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    module = torch.nn.Sequential(*layers)
    tx, on_nonfinite = RULES[rule]
    plain = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=tx)
    state = zerofn.shard(
        plain, precision=precision, unit=lambda name: name.split(".")[0], offload=offload, device=device
    )

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return (functional_call(module, params, (batch["x"],)) - batch["y"]).square().mean()

    def step(state: Any, batch: Any) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads, on_nonfinite=on_nonfinite), {"loss": loss}

    run, losses = zerofn.compile(step), []
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    for k in range(4):
        draws = torch.Generator().manual_seed(k)
        scale = 1e4 if precision == "fp16" and k == 1 else 1.0
        batch = {n: (scale * torch.randn(32, WIDTH, generator=draws)).to(device, dtype) for n in "xy"}
        state, aux = run(state, batch)
        losses.append(aux["loss"])
    return [x.cpu() for x in tree.leaves((losses, zerofn.unshard(state)))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.allclose(x, y, rtol=0.0, atol=0.0, equal_nan=True) for x, y in zip(a, b, strict=True)
    )


def kernels_tests(run: Any) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-k", "[cuda",
               "--override-ini=addopts=", str(ROOT / "tests/ops/test_cuda.py")]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=max(10.0, run.left() / 2),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "4"},
        )
        said = done.stdout
    except subprocess.TimeoutExpired as error:
        said = f"{(error.stdout or b'')[-500:]!r} not ended in time"
    failed = re.findall(r"^(?:FAILED|ERROR) .*", said, re.M)
    run.row(
        what="tests/ops/test_cuda.py on the GPU",
        passed=bool(re.search(r"\d+ passed", said)) and not failed,
        said=(said.strip().splitlines() or ["nothing"])[-1],
        failed=failed[:20],
    )


def correct(run: Any) -> None:
    """A row for each tier, precision and rule: whether its bits are the resident state's."""
    with tempfile.TemporaryDirectory() as folder:
        for rule, precision in (("clipped", "bf16"), ("ignoring", "bf16"), ("clipped", "fp32"), ("clipped", "fp16"),
                                ("8-bit", "bf16"))[: 2 if run.dry else None]:  # fmt: skip
            expected = trained(run.device, precision, rule, None)
            again = same(expected, trained(run.device, precision, rule, None))
            run.row(what=f"{precision}, {rule}: resident twice", passed=again)
            for tiers in [t for t in TIERS if not run.dry or "cpu" not in t.values()][: 3 if run.dry else None]:
                path = {"path": folder} if "nvme" in tiers.values() else {}
                row = {"what": f"{precision}, {rule}: " + ", ".join(f"{k}={v}" for k, v in tiers.items())}
                if run.left() < 5:
                    run.row(**row, cut_short="no time")
                    return
                try:
                    passed = same(trained(run.device, precision, rule, Offload(**tiers, **path)), expected)
                    run.row(**row, passed=passed)
                except Exception as error:  # one that fails does not end the others
                    run.row(**row, passed=False, error=f"{type(error).__name__}: {error}"[:600])
            if rule == "clipped" and precision == "bf16" and not run.dry:
                kernels_tests(run)
