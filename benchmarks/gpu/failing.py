"""python -m benchmarks.gpu.failing BACKEND HOW [--device cpu]: one of two ranks; rank 1 fails in its third step.

`job` starts both. The other rank must end by itself, and say which rank failed. HOW: "raises" an error in the step, or
is "killed", so that it says nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import functional_call

import zerofn
from benchmarks.common.processes import free_port
from benchmarks.gpu.trial import Trial, begin
from zerofn import optim

FAILS_AT, PATIENCE = 2, "8"
SAID = {"raises": "rank 1: ValueError", "killed": "another rank has ended|rank 1"}  # of the other rank's message


def train(device: str, how: str) -> None:
    trial = Trial(device, "")
    module = trial.model(0.0)
    params = {k: p.detach().clone() for k, p in module.named_parameters()}
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3)), stage=3, device=device)

    @zerofn.compile
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any, batch: Any) -> torch.Tensor:
            logits = functional_call(module, params, (batch["x"],))
            return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    for k in range(1000):
        if k == FAILS_AT and dist.get_rank() == 1:
            print("FAILS", flush=True)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this rank's rows are gone")
        state, _ = step(state, trial.batch(k))


def job(run: Any, backend: str, how: str) -> None:
    """A row for how the rank that did not fail ended: its status, its seconds since the failure, what it said."""
    command = [sys.executable, "-m", "benchmarks.gpu.failing", backend, how, *(["--device", "cpu"] if run.dry else [])]
    places = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ZEROFN_PATIENCE": PATIENCE,
    }
    with tempfile.TemporaryDirectory() as folder:
        logs, started = [Path(folder) / str(rank) for rank in range(2)], []
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                env = os.environ | places | {"RANK": str(rank)}
                started.append(subprocess.Popen(command, stdout=out, stderr=out, env=env))
        began: float | None = None
        while started[0].poll() is None and run.left() > 1:
            if began is None and "FAILS" in logs[1].read_text():
                began = time.monotonic()
            time.sleep(0.05)
        seconds = time.monotonic() - began if began else None
        ended = started[0].poll()
        for process in started:
            process.kill()
            process.wait()
        said = logs[0].read_text(errors="replace").strip().splitlines()
    told = any(re.search(SAID[how], line) for line in said)
    run.row(what=f"2 ranks over {backend}: one is told of another that {how.replace('killed', 'is killed')}",
            passed=bool(ended) and told, seconds=seconds, code=ended, said=said[-3:])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["gloo", "nccl"])
    parser.add_argument("how", choices=["raises", "killed"])
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    begin(options.backend, options.device)
    train(options.device, options.how)


if __name__ == "__main__":
    main()
