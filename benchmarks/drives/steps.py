"""Training steps that a drive bounds: much state on it, little to compute."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch

from benchmarks.drives.offload_worker import Run, Training
from zerofn.offload.disk import Store

UNITS, WIDTH = 24, 2048  # 101 M parameters, 1.2 GB of state
STEPS = 2  # timed at a time


class Steps:
    """A model whose `tiers` lie on the drive; `rate` is what its steps move."""

    def __init__(self, folder: Path, finite_check: bool, **tiers: str) -> None:
        torch.set_num_threads(1)
        self.training = Training(Run(UNITS, WIDTH, finite_check=finite_check, folder=str(folder), **tiers))
        self.training.step()
        # One is the state's, one for gradients that wait for the finite check: it hangs on the compiled step.
        self.stores = [x for x in gc.get_objects() if type(x) is Store and x.name == "offload"]
        read, written = self._moved()
        for _ in range(STEPS):
            self.training.step()
        self.read, self.written = (b - a for a, b in zip((read, written), self._moved(), strict=True))

    def _moved(self) -> tuple[int, int]:
        counts = [store.statistics for store in self.stores]
        return sum(c.bytes_read for c in counts), sum(c.bytes_written for c in counts)

    @property
    def share(self) -> float:
        """Bytes read, of all that were moved."""
        return self.read / (self.read + self.written)

    def close(self) -> None:
        del self.training
        for store in self.stores:
            store.close()

    def rate(self) -> float:
        """Bytes a second, read and written. The drive is busy with another step's end when the clock starts, as it
        is when it stops."""
        self.training.step()
        before, start = sum(self._moved()), time.perf_counter()
        for _ in range(STEPS):
            self.training.step()
        return (sum(self._moved()) - before) / (time.perf_counter() - start)
