"""Compile regions: each once in a process, and once on a host, where other processes wait for its file.

A region's file has what the compiler made of it, by all that the result depends on: the region's text, the options,
the versions of torch and of the devices. So a process that starts again reads files, and traces nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from .._torch_compat import (
    FakeTensorMode,
    bytes_taken,
    compile_graph,
    compiler_cache,
    compiler_missing,
    compiler_state,
    load_graph,
)
from ..graph.liveness import complete_values, moments
from ..graph.nested import REGION
from ..graph.program import tensor_of
from ..util.process import the
from ..util.sizes import in_words

# Sums in one order, each operation rounded as it is alone, results laid out as they were captured.
OPTIONS = {
    "deterministic": True,
    "emulate_precision_casts": True,
    "keep_output_stride": True,
    "fallback_random": True,
    "reorder_for_peak_memory": False,
}
MORE, LEAST = 1 / 200, 1 << 16  # of what is planned, and bytes, by which a region may exceed it
Run = Callable[[list[Any]], Sequence[Any]]  # empties the list


class Like(NamedTuple):
    """What there is to know of a tensor but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> Like:
        """Return it of a tensor."""
        return Like(tuple(x.shape), x.stride(), x.dtype, x.device)

    def empty(self) -> Tensor:
        """Return such a tensor, with whatever is in its memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Region:
    """A compiled region. `run(inputs)` returns its results in memory of their own, and empties the list. `most`: bytes
    that it takes beside its inputs, its results among them.
    """

    def __init__(self, run: Run, shared: Sequence[int] = (), most: int = 0) -> None:
        self.run, self.most = _copying(run, shared) if shared else run, most


class Compiled:
    """The regions of this process, by name. `made`: how many of them it has compiled; `read`: how many it has read.
    `left_out`: those that run operation by operation, because a rank cannot do otherwise.
    """

    def __init__(self) -> None:
        self.regions: dict[str, Region] = {}
        self.left_out: set[str] = set()
        self.made = self.read = 0


def missing(gm: GraphModule) -> str:
    """Return why a graph's regions cannot be compiled here, in a sentence; "" if they can."""
    devices = {x.device.type for n in gm.graph.nodes if (x := tensor_of(n)) is not None}
    return next((reason for kind in sorted(devices) if (reason := compiler_missing(kind))), "")


def compiled(gm: GraphModule) -> Region:
    """Compile a region, or return what was compiled of one of the same name. Raises what the compiler raises, and
    `MemoryError` for a region that takes more memory than the operations alone.
    """
    region = _known(gm)
    if region is None:
        path = file_of(gm)
        with _alone(path.with_suffix(".lock")):
            region = _read(path) or _made(gm, path)
        the(Compiled).regions[gm.meta[REGION]] = region
    if (planned := _planned(gm)) < region.most:
        raise MemoryError(
            f"the compiled region needs {in_words(region.most)}, but its operations need only {in_words(planned)} if "
            "they run one by one."
        )
    return region


def known(gm: GraphModule) -> Region | None:
    """Return a region that this process or another one has compiled; None for a new one, and for one that takes more
    memory than the operations alone.
    """
    region = _known(gm)
    return region if region is not None and region.most <= _planned(gm) else None


def _known(gm: GraphModule) -> Region | None:
    name, regions = gm.meta[REGION], the(Compiled).regions
    if name not in regions and (region := _read(file_of(gm))) is not None:
        regions[name] = region
        the(Compiled).read += 1
    return regions.get(name)


def _planned(gm: GraphModule) -> int:
    """Return the bytes that a region may take beside its inputs: what a plan counts, which has its operations run one
    by one, and a little.

    Of the region alone, and not of the step around it: a region is compiled at every stage and budget or at none.
    """
    complete_values(gm.graph)
    most = max(x.nbytes for x in moments(gm, {}))
    return most + max(int(MORE * most), LEAST)


def file_of(gm: GraphModule) -> Path:
    """Return where a region's file is, or will be."""
    return _folder() / f"{_digest(gm.meta[REGION])}.region"


def _folder() -> Path:
    folder = Path(compiler_cache()) / "zerofn"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest(name: str) -> str:
    return hashlib.sha256(f"{name} laid out {OPTIONS} {_state()} {torch.get_num_threads()}".encode()).hexdigest()[:32]


@functools.cache
def _state() -> str:
    return compiler_state()


def _read(path: Path) -> Region | None:
    """Return a region from its file; None where there is no such file, or it or a library of it is damaged."""
    if not path.exists():
        return None
    try:
        shared, most, content = pickle.loads(path.read_bytes())
        return Region(load_graph(content), shared, most)
    except Exception as error:  # such as an ImportError: file too short
        _remove(path)
        _remove_library(error)
        return None


def _made(gm: GraphModule, path: Path) -> Region:
    """Compile a region, and write its file."""
    given = [x.meta["val"] for x in gm.graph.nodes if x.op == "placeholder"]
    try:
        run, content = _compile(gm, given)
    except Exception as error:
        if not _remove_library(error):
            raise
        run, content = _compile(gm, given)
    the(Compiled).made += 1
    inputs = [Like.of(x).empty().zero_() for x in given]
    shared, most = _shared(run, inputs), bytes_taken(lambda: run(list(inputs)))
    if content:
        fresh = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # without room on the disk it is compiled again next time
            fresh.write_bytes(pickle.dumps((shared, most, content)))
            os.replace(fresh, path)
    return Region(run, shared, most)


def _compile(gm: GraphModule, given: Sequence[Tensor]) -> tuple[Run, bytes]:
    with FakeTensorMode() as mode:
        fakes = [Like.of(x).empty() for x in given]
    return compile_graph(gm, fakes, mode, OPTIONS)


def _remove_library(error: BaseException | None) -> bool:
    """Remove the library that could not be loaded, if that is why a region failed, so that it is compiled again."""
    while error is not None:
        if isinstance(error, ImportError) and error.path:
            return _remove(Path(error.path))
        error = error.__cause__ or error.__context__
    return False


def _remove(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def _shared(run: Run, inputs: Sequence[Tensor]) -> list[int]:
    """Run a compiled region, and return which results lie in the memory of an input or of another result: the compiler
    returns x for x * 1, and one tensor for two that are equal.
    """
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
def _alone(path: Path) -> Iterator[None]:
    """Let one process of this host at a time in here, the next one also where it is killed."""
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
