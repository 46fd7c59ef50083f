"""python -m benchmarks.gpu.ranks BACKEND [--device cpu]: one rank of a small GPT's training on one GPU.

Several ranks share a card over gloo. NCCL takes one rank a card, or several from 2.31 on where
NCCL_MULTI_RANK_GPU_ENABLE=1. `ranks` and `nccl` start them. Rank 0 prints a line "ROW {json}" for each thing that must
hold: every stage has the bits of stage 0 and is near plain torch, also with microbatches and with transfers in
bfloat16, recomputed layers draw the same dropout, offloaded state has the bits of resident state, also in an evaluation
right after a step, and a step's peak is what was planned.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zerofn
from benchmarks.common.processes import free_port
from benchmarks.gpu import failing
from benchmarks.gpu.trial import STEPS, Trial, begin

NEAR, PLANNED = 2e-3, 1.02  # of plain torch's parameters; of the plan's peak


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def trials(trial: Trial, say: Any) -> None:
    first, plan = trial.train(0)
    furthest = _furthest(first, plain := trial.plain())
    say("stage 0 is near plain torch", furthest < NEAR, furthest=furthest, digest=_digest(first))
    for stage in (1, 2, 3):
        found, plan = trial.train(stage)
        say(f"stage {stage} has the bits of stage 0", same(found, first))
    if trial.device.type == "cuda":
        ratio = trial.peak / plan.total
        say("stage 3: peak as planned", ratio <= PLANNED, ratio=ratio, peak=trial.peak, planned=plan.total)
    for precision in ("bf16", "fp16") if trial.device.type == "cuda" else ("bf16",):
        kept, _ = trial.train(3, 0.2, precision)
        again, _ = trial.train(3, 0.2, precision, remat="full")
        say(f"{precision}: recomputed layers draw the same dropout", same(again, kept))
        for name, offload in trial.offloads().items():
            found, _ = trial.train(3, 0.2, precision, offload)
            say(f"{precision}: state in {name} has the bits of resident state", same(found, kept))

    for name, more in (("microbatches", {"num_microbatches": 2}), ("bfloat16", {"storage": {"wire": "bf16"}})):
        expected, _ = trial.train(0, **more)
        losses = [float((x - y).abs()) for x, y in zip(expected[: 2 * STEPS : 2], first[: 2 * STEPS : 2], strict=True)]
        say(f"{name}: stage 0 has about the same losses", max(losses) < NEAR, losses=losses, digest=_digest(expected))
        for stage in (1, 2, 3):
            found, _ = trial.train(stage, **more)
            say(f"{name}: stage {stage} has the bits of stage 0", same(found, expected))
    if dist.get_world_size() > 2:
        mesh = zerofn.Mesh.make(replicate=2, data=dist.get_world_size() // 2)
        expected, _ = trial.train(3, storage={"mesh": mesh})
        furthest = _furthest(expected, plain)
        say("replicated: stage 3 is near plain torch", furthest < NEAR, furthest=furthest)
        found, _ = trial.train(3, storage={"mesh": mesh, "hpz": True})
        say("replicated: shards cut once more have the bits of whole ones", same(found, expected))


def _furthest(found: list[Tensor], plain: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(found[2 * STEPS :], plain, strict=True))


def _digest(found: list[Tensor]) -> str:
    """Of all bits, to compare backends."""
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in found)).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["gloo", "nccl"])
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    begin(options.backend, options.device)
    with tempfile.TemporaryDirectory() as folder:
        trials(Trial(options.device, folder), say_all)
    dist.destroy_process_group()


def say_all(what: str, passed: bool, **found: Any) -> None:
    """Rank 0 prints a row, which has passed if it has on all ranks."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, passed)
    if dist.get_rank() == 0:
        where = _named(dist.get_world_size(), dist.get_backend())
        print("ROW " + json.dumps({"what": f"{where}: {what}", "passed": all(everywhere), **found}), flush=True)


def _named(size: int, backend: str) -> str:
    return f"{size} rank{'s' * (size > 1)} over {backend}"


def job(run: Any, backend: str, size: int, *module: str) -> None:
    """Run some ranks of a module; their rows, and a row for a job that fails or takes too long."""
    device = ["--device", "cpu"] if run.dry else []
    command = [sys.executable, "-m", *(module or ("benchmarks.gpu.ranks", backend)), *device]
    port, logs = str(free_port()), [Path(tempfile.mkstemp()[1]) for _ in range(size)]
    started = []
    for rank, log in enumerate(logs):
        places = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        places["PYTHONFAULTHANDLER"] = "1"  # one that is ended for its time says where it was
        with log.open("w") as out:
            started.append(subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | places))
    why = ""
    while any(x.poll() is None for x in started) and not any(x.poll() for x in started):
        if run.left() < 1:
            why = "no time"
            break
        time.sleep(0.05)
    time.sleep(2.0 * any(x.poll() for x in started))  # the others say what they heard
    for process in started:
        process.send_signal(signal.SIGABRT)
    time.sleep(0.5 * any(x.poll() is None for x in started))
    for process in started:
        process.kill()
        process.wait()
    said = [log.read_text(errors="replace").splitlines() for log in logs]
    for line in said[0]:
        if line.startswith("ROW "):
            run.row(**json.loads(line.removeprefix("ROW ")))
    if why or any(x.returncode for x in started):
        tails = [line[:300] for lines in said for line in lines[-120:] if not line.startswith("ROW ")]
        error = "\n".join(filter(None, [why, *tails]))
        run.row(what=f"{_named(size, backend)}: all ends well", passed=False, error=error)
    for log in logs:
        log.unlink()


def ranks(run: Any) -> None:
    """Two ranks of gloo on one device, then one of NCCL."""
    job(run, "gloo", 2)
    if not run.dry:
        job(run, "nccl", 1)


def meshes(run: Any) -> None:
    """Two ranks of gloo on one device, on meshes."""
    job(run, "gloo", 2, "benchmarks.gpu.meshes", "gloo")


def nccl(run: Any) -> None:
    """Two and four ranks of NCCL on one device, where it allows that: stages, meshes, and ranks that fail."""
    backend = "gloo" if run.dry else "nccl"
    if not run.dry and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        run.row(what="several ranks over NCCL", cut_short="NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.31 are needed")
        return
    for size in (2, 4):
        job(run, backend, size)
    for how in ("raises", "killed"):
        failing.job(run, backend, how)
    for size in (2, 4):
        job(run, backend, size, "benchmarks.gpu.meshes", backend)


if __name__ == "__main__":
    main()
