"""Training steps at every stage and tier, for checks of what runs aside; and defects that such checks must find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zerofn
from tests.support.captured_steps import TX, masked_batch, masked_step, run
from tests.support.small_steps import apart, beside_drives, build, state_of
from zerofn import Offload
from zerofn.job.in_flight import PendingTransfers, pending
from zerofn.memory.arena import Arena
from zerofn.offload.host_worker import HostWorker
from zerofn.util.errors import DiskError

LAYERS, ROWS, STEPS = 5, 64, 3
TIERS: dict[str, Callable[[Path], Offload | None]] = {
    "device": lambda folder: None,
    "host": lambda folder: Offload("cpu"),
    "host, parameters": lambda folder: Offload(optimizer="cpu", params="cpu"),
    "drive": lambda folder: Offload("nvme", path=folder),
    "drive of a device": lambda folder: Offload("nvme", path=folder),
    "drive, parameters": lambda folder: Offload(optimizer="nvme", params="nvme", path=folder),
}
CASES: list[dict[str, Any]] = [
    {"stage": 3, "tier": tier, **more}
    for tier in TIERS
    for more in ({}, {"n": 2, "precision": "bf16"}, {"precision": "fp16", "budget": True})
]
CASES += [{"stage": stage, "tier": tier} for stage in (0, 1, 2) for tier in TIERS if "parameters" not in tier]
CASES += [{"stage": 3, "tier": "host", "share": share} for share in (0.0, 0.5)]


def steps(
    stage: int,
    tier: str,
    folder: Path,
    n: int = 1,
    precision: str | None = None,
    budget: bool = False,
    share: float = 1.0,
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Any:
    """What some steps with dropout, clipping and `n` microbatches give. `share`: of the units that the host updates.
    `inside`: makes what they run in.
    """
    module = build(LAYERS, dropout=0.2)
    step = masked_step(module, n)
    batches = [masked_batch(k, ROWS) for k in range(STEPS)]
    with pytest.MonkeyPatch.context() as patch, inside():
        if tier.startswith("host") or tier == "drive of a device":
            apart(patch, share)
        if tier == "drive of a device":
            beside_drives(patch)
        state, memory = state_of(module, stage, TX, precision=precision, offload=TIERS[tier](folder)), None
        if budget:
            memory = zerofn.compile(step, remat="full").lower(state, batches[0]).memory().total * 9 // 8
        return run(step, state, batches, memory=memory)


def _only_submitted(worker: HostWorker, place: Any, function: Callable[..., Any], *args: Any) -> None:
    """`HostWorker.submit_for` that lets nobody wait."""
    worker.submit(function, *args)


DEFECTS = {  # what it is -> (class, its method, the method that makes the defect, the tier that shows it)
    "a place is handed out while a drive writes from it": (Arena, "leave", lambda *args: None, "drive"),
    "nobody waits for the host's updates": (HostWorker, "submit_for", _only_submitted, "host"),
    "nobody waits for what drives read": (PendingTransfers, "wait", lambda *args: None, "drive"),
}


@contextlib.contextmanager
def broken(defect: str) -> Iterator[str]:
    """Inside, the runtime has this defect; gives the tier that shows it."""
    owner, name, method, tier = DEFECTS[defect]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, method)
            yield tier
    finally:
        while pending().transfers:  # what nobody waited for
            with contextlib.suppress(DiskError):  # and the defect may have broken
                pending().wait_for_all()
