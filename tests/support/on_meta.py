"""Steps of a device that is not the host, captured without one: torch's `meta` device stands for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import zerofn
from tests.support.small_steps import apart, batch_of, build, loss_of, unit_of
from zerofn import Offload, passes, tree
from zerofn.capture.capture import capture
from zerofn.graph.program import Program
from zerofn.offload.drive_tensor import DriveTensor
from zerofn.offload.host_tensor import HostTensor
from zerofn.sharding.sharded import Sharded, is_sharded
from zerofn.sharding.storage import Stored

DEVICE = torch.device("meta")


def moved(state: Any, mode: FakeTensorMode) -> Any:
    """The state as it would be beside the device: fake tensors there; what is offloaded, and counters, on the host."""

    def fake(x: torch.Tensor, device: Any) -> torch.Tensor:
        with mode:
            return torch.empty(x.shape, dtype=x.dtype, device=device)

    def part(x: Any) -> Any:
        if isinstance(x, HostTensor):
            return HostTensor(fake(x.handle, "cpu"), DEVICE)
        if isinstance(x, DriveTensor):
            there = DriveTensor(x.handle, x.dtype, x.size, DEVICE)
            there.handle = fake(x.handle, "cpu")
            return there
        return fake(x, DEVICE)

    def one(x: Any) -> Any:
        if not is_sharded(x):
            return x if x is state.step or x is state.rng else fake(x, DEVICE)
        storages = [
            k
            if k.placement is None
            else dataclasses.replace(k, placement=dataclasses.replace(k.placement, device="meta"))
            for k in x.storages
        ]
        return Sharded(x.spec, [Stored(k, tuple(map(part, y.parts))) for k, y in zip(storages, x.stored, strict=True)])

    new = tree.tree_map(one, state, is_leaf=is_sharded)
    return new.replace(step=fake(new.step, "cpu"), rng=fake(new.rng, "cpu"))


def scheduled(
    path: Path,
    tiers: dict[str, str] | None,
    precision: str | None,
    tx: Any,
    on_nonfinite: str,
    share: float,
    patch: pytest.MonkeyPatch,
    num_layers: int = 4,
    num_microbatches: int = 1,
) -> Program:
    """A step after all passes. The nodes of its graph have fake tensors as values. `share`: of the units that the host
    updates.
    """
    apart(patch, share)
    module = build(num_layers)
    plain = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=tx)
    offload = Offload(**tiers, path=path if "nvme" in tiers.values() else None) if tiers else None
    state = zerofn.shard(plain, unit=unit_of, precision=precision, offload=offload)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        batch = {k: torch.empty(x.shape, dtype=dtype, device=DEVICE) for k, x in batch_of().items()}

    def step(state: Any, batch: Any) -> Any:
        gradient = state.value_and_grad(loss_of(module))
        loss, grads = (zerofn.accumulate(gradient, num_microbatches) if num_microbatches > 1 else gradient)(batch)
        return state.apply_gradients(grads, on_nonfinite=on_nonfinite), {"loss": loss}

    program = capture(step, moved(state, mode), batch)
    passes.run(program, donating=True)
    return program
