"""Compile regions: each once in a process, and once on a host, where other processes wait for the first."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .._torch_compat import FakeTensorMode, compile_graph, compiler_cache, compiler_missing
from ..graph.nested import REGION
from ..graph.program import tensor_of
from ..util.process import the

# Sums in one order, each operation rounded as it is alone, results laid out as they were captured.
OPTIONS = {
    "deterministic": True,
    "emulate_precision_casts": True,
    "keep_output_stride": True,
    "fallback_random": True,
    "reorder_for_peak_memory": False,
}
Run = Callable[[list[Any]], Sequence[Any]]  # empties the list


class Region:
    """A compiled region. `run(inputs)` returns its results in memory of their own, and empties the list."""

    def __init__(self, run: Run, shared: Sequence[int]) -> None:
        self.run = _copying(run, shared) if shared else run


class Compiled:
    """The regions of this process, by name."""

    def __init__(self) -> None:
        self.regions: dict[str, Region] = {}


def missing(gm: GraphModule) -> str:
    """Return why a graph's regions cannot be compiled here, in a sentence; "" if they can."""
    devices = {x.device.type for n in gm.graph.nodes if (x := tensor_of(n)) is not None}
    return next((reason for kind in sorted(devices) if (reason := compiler_missing(kind))), "")


def compiled(gm: GraphModule) -> Region:
    """Compile a region, or return what was compiled of one of the same name. Raises what the compiler raises."""
    name, known = gm.meta[REGION], the(Compiled).regions
    if name not in known:
        with _alone(name):
            known[name] = _compile(gm)
    return known[name]


def _compile(gm: GraphModule) -> Region:
    given = [x.meta["val"] for x in gm.graph.nodes if x.op == "placeholder"]
    with FakeTensorMode() as mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in given]
    run = compile_graph(gm, fakes, mode, OPTIONS)
    return Region(run, _shared(run, given))


def _shared(run: Run, given: Sequence[Tensor]) -> list[int]:
    """Run a compiled region on zeros, and return which results lie in the memory of an input or of another result: the
    compiler returns x for x * 1, and one tensor for two that are equal.
    """
    inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_() for x in given]
    seen = {x.untyped_storage().data_ptr() for x in inputs}
    found = []
    for k, x in enumerate(run(list(inputs))):
        at = x.untyped_storage().data_ptr()
        if at in seen and x.numel():
            found.append(k)
        seen.add(at)
    return found


def _copying(run: Run, shared: Sequence[int]) -> Run:
    def copying(inputs: list[Any]) -> list[Any]:
        out = list(run(inputs))
        for k in shared:
            out[k] = out[k].clone()
        return out

    return copying


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Let one process of this host compile a region at a time; those behind it find it in the compiler's cache."""
    folder = Path(compiler_cache()) / "zerofn"
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / f"{name}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
