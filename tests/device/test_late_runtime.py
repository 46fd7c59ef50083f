"""Steps in a runtime in which everything is as late as it may be, and memory that nobody owns is overwritten."""

import contextlib

import pytest

import zerofn
from tests.support.captured_steps import TX, masked_batch, masked_step, rank, run
from tests.support.late_runtime import late
from tests.support.same import assert_same_trees
from tests.support.small_steps import apart, build, state_of
from zerofn import Offload
from zerofn.comm.pending import PendingTransfers
from zerofn.memory.arena import Arena
from zerofn.offload.host_worker import HostWorker

LAYERS, ROWS, STEPS = 5, 64, 3
TIERS = {
    "device": None,
    "host": lambda folder: Offload("cpu"),
    "host, parameters": lambda folder: Offload(optimizer="cpu", params="cpu"),
    "drive": lambda folder: Offload("nvme", path=folder),
    "drive, parameters": lambda folder: Offload(optimizer="nvme", params="nvme", path=folder),
}


def steps(stage, tier, folder, n=1, precision=None, budget=False, share=1.0, adverse=True):
    """What some steps give, as late as may be or at once."""
    module = build(LAYERS, dropout=0.2)
    step = masked_step(module, n)
    batches = [masked_batch(k, ROWS) for k in range(STEPS)]
    with pytest.MonkeyPatch.context() as patch, late() if adverse else contextlib.nullcontext():
        if tier.startswith("host"):
            apart(patch, share)
        options = {"offload": TIERS[tier](folder)} if TIERS[tier] else {}
        state, memory = state_of(module, stage, TX, precision=precision, **options), None
        if budget:
            least = zerofn.compile(step, remat="full").lower(state, batches[0]).memory().total
            memory = least * 9 // 8
        return run(step, state, batches, memory=memory)


def both(folder, *cases):
    for case in cases:
        found = [steps(**case, folder=folder, adverse=adverse) for adverse in (True, False)]
        assert_same_trees(*found, f"{case}, rank {rank()}", equal_nan=True)


CASES = [
    {"stage": 3, "tier": tier, **more}
    for tier in TIERS
    for more in ({}, {"n": 2, "precision": "bf16"}, {"precision": "fp16", "budget": True})
]
CASES += [{"stage": stage, "tier": tier} for stage in (0, 1, 2) for tier in TIERS if "parameters" not in tier]
CASES += [{"stage": 3, "tier": "host", "share": share} for share in (0.0, 0.5)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank(tmp_path, case):
    both(tmp_path, case)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_ranks(ranks, tmp_path, num_ranks):
    ranks(num_ranks, both, tmp_path, *CASES[num_ranks::num_ranks])


def only_submitted(worker, place, function, *args):
    """`HostWorker.submit_for` that lets nobody wait."""
    worker.submit(function, *args)


DEFECTS = {  # what it is -> what makes it, on which tier
    "a place is handed out while a drive writes from it": (Arena, "leave", lambda *args: None, "drive"),
    "nobody waits for the host's updates": (HostWorker, "submit_for", only_submitted, "host"),
    "nobody waits for what drives read": (PendingTransfers, "wait", lambda *args: None, "drive"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_found(tmp_path, monkeypatch, defect):
    owner, name, broken, tier = DEFECTS[defect]
    right = steps(3, tier, tmp_path)
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        assert_same_trees(steps(3, tier, tmp_path), right, equal_nan=True)
