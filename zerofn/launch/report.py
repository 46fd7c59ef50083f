"""`zerofn report`: what this machine has, measured, and what each shortage costs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zerofn

from .. import optim
from .run import run

_LIBRARIES = ("zerofn", "torch", "optree", "numpy", "safetensors", "transformers", "tensordict", "deepspeed")
_FILES, _SHARED = 4096, 1 << 30  # descriptors, bytes of /dev/shm that are enough
_TRAINING = 10.0  # seconds
_UPDATED = 8 << 20  # parameters


@dataclass(frozen=True)
class Finding:
    """One line: what, and how it is. `advice`: what one loses by it, and how to fix it; "" where all is well."""

    what: str
    value: str
    advice: str = ""


def findings(folder: Path | None, ranks: int | None = None) -> Iterator[Finding]:
    """Yield what is found, as it is found. `folder`: on the drive to measure, None for none. `ranks`: of the training.

    Takes some half a minute.
    """
    size = ranks or min(8, torch.cuda.device_count() or _processors())
    yield from _versions()
    yield from _hardware()
    yield from _limits()
    yield from _measured(folder, size)
    yield from _training(size)


def _versions() -> Iterator[Finding]:
    found = [
        f"{name} {importlib.metadata.version(name)}"
        for name in _LIBRARIES
        if importlib.util.find_spec(name) is not None
    ]
    yield Finding("versions", f"python {platform.python_version()}, {', '.join(found)}")
    yield Finding("system", f"{platform.platform()}, {platform.node()}")


def _hardware() -> Iterator[Finding]:
    usable, whole = _processors(), os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    yield Finding("processors", f"{usable} of {whole} usable by this process; OMP_NUM_THREADS {threads}")
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if not torch.backends.cuda.is_built() else "no device is visible"
        yield Finding("GPUs", f"none: {why}", _gpu_advice())
        return
    for k in range(torch.cuda.device_count()):
        has = torch.cuda.get_device_properties(k)
        memory, version = f"{has.total_memory / 1e9:.0f} GB", f"compute capability {has.major}.{has.minor}"
        yield Finding(f"GPU {k}", f"{has.name}, {memory}, {version}")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding("CUDA", f"{torch.version.cuda}, driver {_driver()}, NCCL {nccl}")
    cupy = importlib.util.find_spec("cupy") is not None
    yield Finding(
        "CuPy",
        "installed" if cupy else "missing",
        ""
        if cupy
        else "Optimizer updates on the GPU use torch's operations: several passes over memory instead of one. "
        f"pip install 'zerofn[cuda{(torch.version.cuda or '13').partition('.')[0]}]'",
    )


def _gpu_advice() -> str:
    if torch.backends.cuda.is_built() or shutil.which("nvidia-smi") is None:
        return ""
    return "This machine has an NVIDIA driver, but this torch cannot use it. pip install torch, from the index for CUDA"


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else "unknown"


def _limits() -> Iterator[Finding]:
    memory = {x.split(":")[0]: int(x.split()[1]) * 1024 for x in Path("/proc/meminfo").read_text().splitlines()}
    yield Finding(
        "memory", f"{memory['MemTotal'] / 1e9:.1f} GB, {memory['MemAvailable'] / 1e9:.1f} GB of it free, {_cgroup()}"
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield Finding(
        "open files",
        _limit(files, 1, ""),
        ""
        if files == resource.RLIM_INFINITY or files >= _FILES
        else f"Loaders with many workers and checkpoints of many ranks need more open files. ulimit -n {_FILES}",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Finding("locked memory", _limit(locked, 1e6, " MB"))
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    yield Finding(
        "/dev/shm",
        f"{shared / 1e9:.1f} GB",
        ""
        if shared >= _SHARED
        else "Workers of a DataLoader send batches through it, and crash with a bus error when it is full. In a "
        "container: --shm-size=8g",
    )


def _limit(value: int, unit: float, name: str) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else f"{value / unit:,.0f}{name}"


def _cgroup() -> str:
    file = Path("/sys/fs/cgroup/memory.max")
    text = file.read_text().strip() if file.is_file() else "max"
    return "no limit of a container's" if text == "max" else f"a container's limit of {int(text) / 1e9:.1f} GB"


def _measured(folder: Path | None, size: int) -> Iterator[Finding]:
    machine = run(zerofn.this_machine, folder, ranks=size) if size > 1 else zerofn.this_machine(folder)
    rates = ", ".join(f"{name} {x / 1e9:,.0f} GFLOP/s" for name, x in machine.flops.items())
    yield Finding("matrix products", f"{rates}, of each of {size} ranks at once")
    yield Finding("memory bandwidth", f"{machine.memory_rate / 1e9:.1f} GB/s of each rank")
    if size > 1:
        link = f"{machine.link / 1e9:.2f} GB/s, {machine.latency * 1e6:.0f} us a transfer"
        yield Finding("between ranks", link)
        if machine.slowest > 1.2:
            yield Finding(
                "slowest rank",
                f"{machine.slowest:.2f} times the average",
                "Every step waits for the slowest rank. See which other processes run: top",
            )
    if folder is not None:
        low = machine.disk_read < 1e9
        yield Finding(
            f"drive of {folder}",
            f"reads {machine.disk_read / 1e9:.2f} GB/s, writes {machine.disk_write / 1e9:.2f} GB/s, "
            f"{machine.disk / 1e9:.0f} GB free",
            "offload='nvme' would wait for this drive: a billion parameters need 12 GB of Adam's state, read and "
            "written in every step. Use a local NVMe drive: Offload(path=...)"
            if low
            else "",
        )
    update = _update_rate()
    # One process updates, on CPUs with the threads of all ranks; the bandwidth is one rank's, with all at once.
    share = update / (machine.memory_rate * (1 if torch.cuda.is_available() else size))
    yield Finding(
        "AdamW's kernel",
        f"{update / 1e9:.1f} GB/s, {share:.0%} of the memory bandwidth",
        ""
        if share > 0.35
        else "Updates are slower than necessary: the kernels were not built for this machine. pip install "
        "--force-reinstall --no-binary zerofn zerofn, with a C++ compiler",
    )


def _update_rate() -> float:
    """Bytes a second of one AdamW update, run: it reads and writes parameter and moments, and reads the gradient."""

    def adamw_update(state: zerofn.TrainState, grads: Any) -> tuple[zerofn.TrainState, None]:
        return state.apply_gradients(grads, on_nonfinite="ignore"), None

    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = zerofn.TrainState.create(params={"w": torch.zeros(_UPDATED, device=device)}, tx=optim.adamw(1e-3))
    step, grads = zerofn.compile(adamw_update), {"w": torch.ones(_UPDATED, device=device)}
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        state, _ = step(state, grads)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 28 * _UPDATED / best


def _training(size: int) -> Iterator[Finding]:
    """Train for ten seconds on all devices, at stage 3."""
    try:
        first, last, steps, seconds = run(_train, _TRAINING, ranks=size) if size > 1 else _train(_TRAINING)
    except Exception as error:
        yield Finding("training", f"failed: {type(error).__name__}: {error}", "Its output says where")
        return
    yield Finding(
        f"training on {size} rank{'s' if size > 1 else ''}",
        f"{steps} steps in {seconds:.1f} s at stage 3, the loss from {first:.3f} to {last:.3f}",
        ""
        if last < first
        else "The model does not learn: a kernel or a transfer is wrong on this machine. Please report it",
    )


def _train(seconds: float) -> tuple[float, float, int, float]:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def build() -> torch.nn.Module:
        torch.manual_seed(0)  # the same weights on all ranks
        gelu = torch.nn.GELU()
        first, second, last = (torch.nn.Linear(*n, device=device) for n in ((64, 256), (256, 256), (256, 8)))
        return torch.nn.Sequential(first, gelu, second, gelu, last)

    module = zerofn.skeleton(build)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        out = torch.func.functional_call(module, params, (batch["x"],))
        return torch.nn.functional.cross_entropy(out, batch["y"])

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    state = zerofn.shard(
        lambda: zerofn.TrainState.create(params=dict(build().named_parameters()), tx=optim.adamw(1e-3)), stage=3
    )
    step, rank = zerofn.compile(train_step), zerofn.Mesh.of(None).axis().rank
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(64, 64, generator=draw).to(device)
    batch = {"x": x, "y": x[:, :8].argmax(-1)}
    state, loss = step(state, batch)
    first, start, steps = float(loss), time.perf_counter(), 1
    # All ranks must take as many steps: the first one's clock decides, told with every tenth step.
    while True:
        for _ in range(10):
            state, loss = step(state, batch)
        steps += 10
        spent = torch.tensor([time.perf_counter() - start if rank == 0 else 0.0], device=device)
        if float(zerofn.collectives.all_reduce(spent, zerofn.Mesh.of(None).all)) > seconds:
            return first, float(loss), steps, time.perf_counter() - start


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def report(folder: Path | None, ranks: int | None) -> int:
    """Print all findings; return how many have advice."""
    count = 0
    for found in findings(folder, ranks):
        print(f"{found.what:<22} {found.value}", flush=True)
        if found.advice:
            count += 1
            print(f"{'':<22} ! {found.advice}.", flush=True)
    print(f"{count} finding{'s' if count != 1 else ''} to look at." if count else "Nothing to look at.")
    return count
