"""Compile regions in a process of their own, while a step runs without them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule

from .._torch_compat import FakeTensorMode, LazyGraphModule, OpOverload
from ..graph.liveness import tensors_of
from ..graph.nested import REGION
from .regions import Like, compiled, file_of

_PROGRAM = "import sys; from zerofn.lowering.aside import compile_all; compile_all(sys.argv[1])"


class _Ref(NamedTuple):
    """The k-th node of a graph, as an argument."""

    k: int


def done_file(gms: Sequence[GraphModule]) -> Path:
    """Return the file that is there once somebody has tried to compile all of these regions."""
    files = sorted({file_of(gm) for gm in gms})
    name = hashlib.sha256(" ".join(x.name for x in files).encode()).hexdigest()[:32]
    return files[0].with_name(f"{name}.done")


def start(gms: Sequence[GraphModule]) -> None:
    """Start the process that compiles regions, and writes their `done_file` at its end."""
    described = [_described(gm) for gm in gms]
    file, name = tempfile.mkstemp(suffix=".regions")
    with os.fdopen(file, "wb") as out:
        pickle.dump((torch.get_num_threads(), described), out)
    path = os.pathsep.join(x for x in sys.path if x)
    quiet: Any = subprocess.DEVNULL
    job = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, name], env={**os.environ, "PYTHONPATH": path}, stdin=quiet, stdout=quiet,
        stderr=quiet)  # fmt: skip
    threading.Thread(target=job.wait, name="zerofn-compiling", daemon=True).start()  # no zombie stays


def compile_all(name: str) -> None:
    """In the process: compile the regions that a file describes, and remove it."""
    os.nice(10)  # the step goes first
    threads, described = pickle.loads(Path(name).read_bytes())
    os.unlink(name)
    torch.set_num_threads(threads)
    gms = [_made_of(x) for x in described]
    for gm in gms:
        with contextlib.suppress(Exception):  # a region that does not compile runs operation by operation
            compiled(gm)
    done_file(gms).touch()


def _described(gm: GraphModule) -> tuple[str, list[Any]]:
    """Return a region's name, and its nodes in a form that can be written to a file."""
    order = {x: _Ref(k) for k, x in enumerate(gm.graph.nodes)}
    nodes: list[Any] = []
    for x in gm.graph.nodes:
        if x.op == "placeholder":
            (like,) = tensors_of(x.meta["val"])
            nodes.append((x.op, x.name, Like.of(like), {}))
        else:
            target = str(x.target) if isinstance(x.target, OpOverload) else x.target
            args, kwargs = torch.fx.node.map_arg((x.args, x.kwargs), order.__getitem__)
            nodes.append((x.op, target, args, kwargs))
    return gm.meta[REGION], nodes


def _made_of(described: tuple[str, list[Any]]) -> GraphModule:
    name, nodes = described
    graph, made = Graph(), list[Any]()
    with FakeTensorMode():
        for op, target, args, kwargs in nodes:
            if op == "placeholder":
                made.append(graph.placeholder(target))
                made[-1].meta["val"] = args.empty()
            elif op == "output":
                graph.output(_put(args[0], made))
            else:
                function = _overload(target) if isinstance(target, str) else target
                made.append(graph.call_function(function, _put(args, made), _put(kwargs, made)))
    gm = LazyGraphModule({}, graph)
    gm.meta[REGION] = name
    return gm


def _put(value: Any, made: Sequence[Any]) -> Any:
    """Return arguments with nodes in place of references."""
    if isinstance(value, _Ref):
        return made[value.k]
    if isinstance(value, dict):
        return {k: _put(x, made) for k, x in value.items()}
    return type(value)(_put(x, made) for x in value) if isinstance(value, list | tuple) else value


def _overload(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
