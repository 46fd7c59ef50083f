"""One training run of an offloaded model, in a process of its own: what it took beyond its imports.

The argument is a JSON object with the fields of `Run`. What is printed behind RESULT: `parameters`; `peak`, bytes of
anonymous memory above what the process had after its imports, from the first line of `shard` to the last step;
`losses`, or `refused`, what was said where the limit did not suffice; `late_imports`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import resource
import sys
import threading
from typing import Any

import torch
from torch import Tensor, nn

import zerofn
from zerofn import optim

ROWS = 4  # of a batch
EXACT = zerofn.Precision(torch.float32, torch.bfloat16, torch.bfloat16)  # a split master, gradients of 2 bytes


@dataclasses.dataclass(frozen=True)
class Run:
    """`precision`: EXACT by default. `limit`: bytes of private writable memory (RLIMIT_DATA) beyond the imports, 0 for
    none. `preload`: modules that an earlier run imported on the way."""

    units: int
    width: int
    moments: str | None = None
    finite_check: bool = False
    precision: str | None = None
    optimizer: str | None = None
    params: str | None = None
    folder: str | None = None
    steps: int = 3
    limit: int = 0
    preload: tuple[str, ...] = ()

    @property
    def offload(self) -> zerofn.Offload | None:
        return zerofn.Offload(self.optimizer, self.params, self.folder) if self.optimizer or self.params else None


class Net(nn.Module):
    """A chain of square layers: much state, and little to compute for a batch of a few rows."""

    def __init__(self, units: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / len(self.layers)
        return x


class Training:
    """The state of a run, and `step`, which gives the loss."""

    def __init__(self, run: Run) -> None:
        model = zerofn.skeleton(lambda: Net(run.units, run.width))
        tx = optim.adamw(1e-3, moments=run.moments)
        if run.finite_check:
            tx = optim.chain(optim.clip_by_global_norm(1.0), tx)

        def loss_of(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            out = torch.func.functional_call(model, params, (batch[0],))
            return (out.float() - batch[1].float()).square().mean()

        def train_step(state: Any, batch: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
            loss, grads = state.value_and_grad(loss_of)(batch)
            return state.apply_gradients(grads, on_nonfinite="skip" if run.finite_check else "ignore"), loss

        def create() -> Any:
            return zerofn.TrainState.create(params=dict(Net(run.units, run.width).named_parameters()), tx=tx)

        torch.manual_seed(0)
        self.batch = (torch.randn(ROWS, run.width).bfloat16(), torch.randn(ROWS, run.width).bfloat16())
        self.state = zerofn.shard(create, stage=3, precision=run.precision or EXACT, offload=run.offload)
        self._step = zerofn.compile(train_step)

    def step(self) -> float:
        self.state, loss = self._step(self.state, self.batch)
        return loss.item()


def status(field: str) -> int:
    """Bytes of a field of this process's status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field + ":"))


class Peak:
    """The most anonymous memory that a thread of its own saw, looking every millisecond."""

    def __init__(self) -> None:
        self.nbytes, self._ends = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)  # an error ends the process
        self._thread.start()

    def _watch(self) -> None:
        while not self._ends.wait(0.001):
            self.nbytes = max(self.nbytes, status("RssAnon"))

    def end(self) -> int:
        self._ends.set()
        self._thread.join()
        return self.nbytes


def main() -> None:
    run = Run(**json.loads(sys.argv[1]))
    for module in run.preload:
        with contextlib.suppress(Exception):  # some can only be imported by what imported them
            importlib.import_module(module)
    gc.collect()
    before, data, modules = status("RssAnon"), status("VmData"), set(sys.modules)
    if run.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (data + run.limit, data + run.limit))
    peak, found = Peak(), {}
    try:
        training = Training(run)
        found["losses"] = [training.step() for _ in range(run.steps)]
    except (MemoryError, RuntimeError) as error:
        if not run.limit or not (isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
            raise
        found["refused"] = str(error).splitlines()[0]
    found |= {"peak": peak.end() - before, "parameters": run.units * run.width**2}
    found["late_imports"] = [name for name in sys.modules if name not in modules]
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
