"""A training that can be disturbed. It ends with the same bits at 1, 2 and 4 ranks, wherever it was interrupted.

All ranks have the same batch, so gradients are averages of equal numbers, which are exact for powers of two; all else
is elementwise. A line of the log for every step says when it was done, and the bits of its loss.
"""

from __future__ import annotations

import argparse
import errno
import os
import time
from pathlib import Path
from typing import Any

import torch

import zerofn
from zerofn import optim

WIDTH = 48


class Numbers:
    """A loader without end: a batch is a function of its number."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> dict[str, torch.Tensor]:
        self.at += 1
        generator = torch.Generator().manual_seed(self.at)
        x = torch.randn(8, WIDTH, generator=generator)
        return {"x": x, "y": x.roll(1, 1).tanh()}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def init() -> zerofn.TrainState:
    generator = torch.Generator().manual_seed(0)
    sizes = {"0.w": (4 * WIDTH, WIDTH), "0.b": (4 * WIDTH,), "1.w": (WIDTH, 4 * WIDTH), "1.b": (WIDTH,)}
    params = {name: torch.randn(size, generator=generator) / 8 for name, size in sizes.items()}
    return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3))


def train_step(state: Any, batch: dict[str, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    def loss_fn(params: Any) -> torch.Tensor:
        p = zerofn.gather(params)
        hidden = torch.nn.functional.gelu(batch["x"] @ p["0.w"].T + p["0.b"])
        return (hidden @ p["1.w"].T + p["1.b"] - batch["y"]).square().mean()

    grads, loss = torch.func.grad_and_value(loss_fn)(state.params)
    return state.apply_gradients(grads), loss


def obey(faults: Path) -> None:
    """Let every flush of a file do what the file `faults` says now: "full", or "slow" and seconds."""
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        what = faults.read_text().split() if faults.exists() else []
        if what[:1] == ["full"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if what[:1] == ["slow"]:
            time.sleep(float(what[1]))
        flush(descriptor)

    os.fsync = fsync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--until", type=int, help="a step; without it the training goes on until a signal")
    args = parser.parse_args()
    obey(args.folder / "faults")
    loader, step = Numbers(), zerofn.compile(train_step)
    checkpoints = zerofn.Checkpoints(args.folder / "checkpoints", every=args.every, keep=3, loader=loader)
    state = checkpoints.restore_or(zerofn.shard(init, stage=3))
    with (args.folder / f"log-{os.environ.get('RANK', '0')}.txt").open("a") as log:
        while checkpoints.step != args.until:
            state, loss = step(state, next(loader))
            log.write(f"{os.getpid()} {time.time():.3f} {checkpoints.step + 1} {float(loss).hex()}\n")
            log.flush()
            checkpoints.after_step(state, loss)
    checkpoints.save(state)
    checkpoints.close()


if __name__ == "__main__":
    main()
