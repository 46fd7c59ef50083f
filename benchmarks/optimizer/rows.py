"""python -m benchmarks.optimizer.rows THREADS ELEMENTS: a row of optimizer.py for each name read from stdin.

Each run's seconds are written to stdout. Arrays are made at a row's first run, which is not timed by optimizer.py.
All rows work on the same arrays in one process, in the peers' environment, because where the pages of an array lie
changes a row by a tenth. What a state keeps lies as ZeroFn's states do, in huge pages, for the peers' rows too; the
gradient is where torch puts it. ZeroFn's kernels need nothing but torch: they are taken from ZEROFN_FOLDERS, without
the rest. A name that ends in ", AVX2" leaves AVX-512 alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path

THREADS, SIZE = int(sys.argv[1]), int(sys.argv[2])
os.environ["OMP_NUM_THREADS"] = str(THREADS)

import torch  # noqa: E402  (after the number of threads is said)

RATE, DECAY, B1, B2, EPS = 1e-3, 0.1, 0.9, 0.999, 1e-8
HYPER = {"b1": B1, "b2": B2, "eps": EPS}
MAX_NORM, UNSCALE = 1.0, 1.0  # bf16 needs no loss scale; the paths still multiply by it

LOOP = """
void pass(float *p, const float *g, float *m, float *v, long n) {
    for (long i = 0; i < n; ++i) { float x = 0.0f * g[i]; p[i] += x; m[i] += x; v[i] += x; }
}
"""


def kept(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` where a state lies."""
    from zerofn.memory.host_allocator import zeros

    return zeros(x.numel(), x.dtype, x.device).copy_(x)


class Arrays:
    """What the rows work on, made when first asked for."""

    @cached_property
    def p(self) -> torch.Tensor:
        return torch.nn.Parameter(kept(torch.randn(SIZE)))

    @cached_property
    def g(self) -> torch.Tensor:
        return torch.randn(SIZE) * 1e-2

    @cached_property
    def g_bf16(self) -> torch.Tensor:
        return self.g.bfloat16()

    @cached_property
    def p_bf16(self) -> torch.Tensor:
        return kept(self.p.detach().bfloat16())

    @cached_property
    def g_buffer(self) -> torch.Tensor:
        return kept(torch.zeros(SIZE))

    @cached_property
    def p_buffer(self) -> torch.Tensor:
        return kept(torch.zeros(SIZE, dtype=torch.bfloat16))

    @cached_property
    def m(self) -> torch.Tensor:
        return kept(self.g * 0.1)

    @cached_property
    def v(self) -> torch.Tensor:
        return kept(self.g.square())

    @cached_property
    def split(self) -> list[torch.Tensor]:
        from zerofn.ops import cpu

        return [kept(x) for x in cpu.split(self.p.detach())]

    @cache  # noqa: B019  (there is one object)
    def moments(self, form: str) -> list[list[torch.Tensor]]:
        from zerofn.ops import cpu

        if form == "fp32":
            return [[self.m], [self.v]]
        if form == "bf16":
            return [[kept(x.bfloat16())] for x in (self.m, self.v)]
        return [[kept(y) for y in cpu.encode(x, x is self.m)] for x in (self.m, self.v)]

    @cache  # noqa: B019
    def optimizer(self, kind: str) -> torch.optim.Optimizer:
        options = {"lr": RATE, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY}
        if kind == "DeepSpeed":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam([self.p], adamw_mode=True, **options)
        return torch.optim.AdamW([self.p], fused=kind == "fused", foreach=False, **options)


X = Arrays()


def find_zerofn() -> None:
    """Make `zerofn.ops` importable without `zerofn/__init__.py`, which asks for more than the peers have."""
    for name, folders in json.loads(os.environ["ZEROFN_FOLDERS"]).items():
        package = types.ModuleType(name)
        package.__path__ = folders
        sys.modules[name] = package


def stepped(kind: str, gradient: torch.Tensor) -> None:
    X.p.grad = gradient
    X.optimizer(kind).step()
    X.p.grad = None


def zerofn(master: str, form: str, gradient: str, factors: tuple[float, ...] = ()) -> None:
    from zerofn.ops import adamw, cpu  # noqa: F401 - declares the rule

    p = [X.p.detach()] if master == "fp32" else X.split
    cpu.update_(
        "adamw",
        p,
        X.g if gradient == "fp32" else X.g_bf16,
        X.moments(form),
        starts=[0],
        stops=[SIZE],
        rates=[RATE],
        decays=[DECAY],
        factors=factors,
        hyper=HYPER,
        count=10,
    )


@cache
def loop() -> ctypes.CDLL:
    folder = tempfile.mkdtemp()
    source, library = Path(folder) / "loop.c", Path(folder) / "loop.so"
    source.write_text(LOOP)
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


def read_modify_write() -> None:
    """As many arrays as AdamW in fp32: reads p, g, m, v, writes p, m, v."""
    step = -(-SIZE // THREADS)

    def part(at: int) -> None:
        pointers = [ctypes.c_void_p(x.data_ptr() + 4 * at) for x in (X.p.detach(), X.g, X.m, X.v)]
        loop()["pass"](*pointers, ctypes.c_long(min(step, SIZE - at)))

    list(pool().map(part, range(0, SIZE, step)))


@cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)


def torch_phase() -> None:
    """Cast, unscale, norm and finiteness, clip, fused update, copy to the bf16 parameters."""
    g = X.g_buffer
    g.copy_(X.g_bf16)
    g.mul_(UNSCALE)
    norm = torch.linalg.vector_norm(g)
    if norm.isfinite():
        g.mul_(torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))
        stepped("fused", g)
        X.p_bf16.copy_(X.p.detach())


def deepspeed_phase() -> None:
    """What ZeRO-offload does on the host, in `stage_1_and_2.py`: `copy_grads_in_partition`, then `step`."""
    from deepspeed.runtime.utils import has_inf_or_nan
    from deepspeed.runtime.zero.utils import get_norm_dtype

    overflow = bool(has_inf_or_nan(X.g_bf16))
    norm = X.g_bf16.to(get_norm_dtype()).norm(2).item()
    g = X.g_buffer
    g.copy_(X.g_bf16)
    if not overflow:
        g.mul_(1.0 / (max(1.0, (norm + 1e-6) / MAX_NORM) / UNSCALE))
        stepped("DeepSpeed", g)
        X.p_buffer.copy_(X.p.detach())
        X.p_bf16.copy_(X.p_buffer)


def zerofn_phase(form: str) -> None:
    """One read for norm and finiteness, one pass for the rest; the master's upper halves are the parameters."""
    from zerofn.ops import cpu

    norm, extreme = cpu.norm2_and_extreme([X.g_bf16])[0]
    if extreme < float("inf"):
        zerofn("split", form, "bf16", (UNSCALE, min(MAX_NORM / (norm * UNSCALE + 1e-6), 1.0)))


ROWS: dict[str, Callable[[], None]] = {
    "read-modify-write": read_modify_write,
    "torch loop": lambda: stepped("loop", X.g),
    "torch fused": lambda: stepped("fused", X.g),
    "DeepSpeedCPUAdam": lambda: stepped("DeepSpeed", X.g),
    "ZeroFn fp32": lambda: zerofn("fp32", "fp32", "fp32"),
    "ZeroFn fp32, bf16 moments": lambda: zerofn("fp32", "bf16", "fp32"),
    "ZeroFn split": lambda: zerofn("split", "fp32", "bf16"),
    "ZeroFn split, bf16 moments": lambda: zerofn("split", "bf16", "bf16"),
    "ZeroFn split, 8-bit moments": lambda: zerofn("split", "8-bit", "bf16"),
    "phase, torch": torch_phase,
    "phase, DeepSpeed": deepspeed_phase,
    "phase, ZeroFn": lambda: zerofn_phase("fp32"),
    "phase, ZeroFn, bf16 moments": lambda: zerofn_phase("bf16"),
    "phase, ZeroFn, 8-bit moments": lambda: zerofn_phase("8-bit"),
}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    find_zerofn()
    sent, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no figure
    for line in sys.stdin:
        name = line.strip().removesuffix(", AVX2")
        os.environ["ZEROFN_ISA"] = "avx2" if name != line.strip() else ""
        began = time.perf_counter()
        ROWS[name]()
        print(time.perf_counter() - began, file=sent, flush=True)


if __name__ == "__main__":
    main()
