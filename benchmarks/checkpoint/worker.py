"""One rank of a system that saves and loads: reads what to do as JSON, line by line, and answers with RESULT.

python -m benchmarks.checkpoint.worker SYSTEM RANK WORLD PORT FOLDER WIDTH LAYERS
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

ROWS = 256  # of a batch


class System(Protocol):
    """A model with its optimizer's state. `save` returns what waits until it is complete."""

    nbytes: int  # of this rank's part

    def step(self, batch: torch.Tensor) -> None: ...

    def save(self, path: Path, wait: bool) -> Callable[[], bool]: ...

    def load(self, path: Path) -> None: ...


class ZeroFn:
    def __init__(self, width: int, layers: int) -> None:
        import zerofn
        from zerofn import optim

        self._zerofn = zerofn
        names = [f"h.{k}.w" for k in range(layers)]

        def init() -> Any:
            params = {name: torch.randn(width, width) * 0.02 for name in names}
            return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-4))

        def train_step(state: Any, batch: torch.Tensor) -> tuple[Any, torch.Tensor]:
            def loss_fn(params: Any) -> torch.Tensor:
                p, x = zerofn.gather(params), batch
                for name in names:
                    x = torch.tanh(x @ p[name])
                return x.square().mean()

            grads, loss = torch.func.grad_and_value(loss_fn)(state.params)
            return state.apply_gradients(grads), loss

        self.state, self._step = zerofn.shard(init, stage=3), zerofn.compile(train_step)
        self.nbytes = 3 * 4 * layers * width * width // dist.get_world_size()

    def step(self, batch: torch.Tensor) -> None:
        self.state, _ = self._step(self.state, batch)

    def save(self, path: Path, wait: bool) -> Callable[[], bool]:
        return self._zerofn.save(path, self.state, wait=wait).done

    def load(self, path: Path) -> None:
        self.state = self._zerofn.load(path, like=self.state, donate=True)


class DCP:
    """torch.distributed.checkpoint of an FSDP2 model and torch's AdamW, as torchtitan's manager calls it."""

    def __init__(self, width: int, layers: int) -> None:
        from torch.distributed.fsdp import fully_shard

        self._model = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        for layer in self._model:
            fully_shard(layer)
        self._group = dist.new_group(backend="gloo")  # beside the training's
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self.nbytes = 3 * 4 * layers * width * width // dist.get_world_size()

    def step(self, batch: torch.Tensor) -> None:
        x = batch
        for layer in self._model:
            x = torch.tanh(layer(x))
        x.square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path, wait: bool) -> Callable[[], bool]:
        import torch.distributed.checkpoint as dcp

        if wait:
            dcp.save(self._state(), checkpoint_id=path)
            return lambda: True
        return dcp.async_save(self._state(), checkpoint_id=path, process_group=self._group).done

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


class DeepSpeed:
    """ZeRO 3 with its own checkpoints. They are written while the training waits."""

    def __init__(self, width: int, layers: int) -> None:
        import deepspeed

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x = torch.tanh(layer(x))
                return x.square().mean()

        model = Model()
        settings = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 3}, "steps_per_print": 10**9}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        self.nbytes = 3 * 4 * layers * width * width // dist.get_world_size()

    def step(self, batch: torch.Tensor) -> None:
        self._engine.backward(self._engine(batch))
        self._engine.step()

    def save(self, path: Path, wait: bool) -> Callable[[], bool]:
        self._engine.save_checkpoint(str(path))
        return lambda: True

    def load(self, path: Path) -> None:
        self._engine.load_checkpoint(str(path))


SYSTEMS: dict[str, Callable[[int, int], System]] = {"ZeroFn": ZeroFn, "torch DCP": DCP, "DeepSpeed": DeepSpeed}


def resident(field: str) -> int:
    """Bytes of this process's memory, as the system counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(field + ":"))


class Rank:
    def __init__(self, system: System, folder: Path, width: int) -> None:
        self.system, self.folder, self.batch = system, folder, torch.randn(ROWS, width)

    def do(self, what: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / what.get("to", "checkpoint")
        if what["do"] == "clear":
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
            dist.barrier()
            return {}
        return getattr(self, what["do"])(path, **what.get("options", {}))

    def memcpy(self, path: Path) -> dict[str, Any]:
        """A copy of as many bytes as this rank has of the state, in memory that was touched before."""
        one = torch.ones(self.system.nbytes, dtype=torch.uint8)
        other = torch.zeros_like(one)
        dist.barrier()
        start = time.perf_counter()
        other.copy_(one)
        return {"seconds": time.perf_counter() - start, "nbytes": self.system.nbytes}

    def steps(self, path: Path, count: int) -> dict[str, Any]:
        return {"steps": [self._step() for _ in range(count)]}

    def save(self, path: Path) -> dict[str, Any]:
        return self._measured(lambda: self.system.save(path, True))

    def load(self, path: Path) -> dict[str, Any]:
        return self._measured(lambda: self.system.load(path))

    def behind(self, path: Path) -> dict[str, Any]:
        """A save behind steps: how long the call took, the steps until all ranks are done, and when that was."""
        dist.barrier()
        start = time.perf_counter()
        done = self.system.save(path, False)
        blocked, steps = time.perf_counter() - start, []
        while True:
            steps.append(self._step())
            left = torch.tensor([0.0 if done() else 1.0])
            dist.all_reduce(left)
            if not left:
                return {"blocked": blocked, "steps": steps[:-1], "seconds": time.perf_counter() - start}

    def _step(self) -> float:
        start = time.perf_counter()
        self.system.step(self.batch)
        return time.perf_counter() - start

    def _measured(self, work: Callable[[], Any]) -> dict[str, Any]:
        """Seconds, and bytes of memory above what was there before."""
        gc.collect()
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        dist.barrier()
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "memory": resident("VmHWM") - before}


def main() -> None:
    system, rank, world, port, folder, width, layers = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    torch.manual_seed(int(rank))
    if system != "ZeroFn":  # which joins by itself
        dist.init_process_group("gloo")
    worker = Rank(SYSTEMS[system](int(width), int(layers)), Path(folder), int(width))
    for _ in range(2):
        worker.system.step(worker.batch)
    for line in sys.stdin:
        print("\nRESULT", json.dumps(worker.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
