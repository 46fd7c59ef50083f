"""The line of the user's code that an operation comes from."""

from __future__ import annotations

import contextlib
import linecache
import os
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.fx import Node

from .._torch_compat import OpOverload, TorchDispatchMode, current_trace
from ..util.user_line import OURS, at_line, library_prefixes, of_python, user_line
from .nested import call_of, graphs_of, is_region

OUTLINED = "outlined"  # a meta key of a region's nodes: the name that a node had where it was first captured


class Lines(TorchDispatchMode):
    """A mode for capture that writes the user's innermost line to `meta["line"]` of every node."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: some libraries refuse to run under a mode, and this tells them to ignore this one."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and mark the nodes that it adds."""
        trace = current_trace()
        nodes = None if trace is None else trace.tracer.graph.nodes
        before = None if nodes is None else next(iter(reversed(nodes)), None)
        out = func(*args, **(kwargs or {}))
        if nodes is not None:
            line = _here()
            for node in reversed(nodes):
                if node is before:
                    break
                node.meta.setdefault("line", line)
        return out


def _here() -> str:
    line = user_line()
    return "" if line is None else at_line(line.file, line.number)


def line_behind(node: Node | None) -> str:
    """Return ' at file:line (code)' of a node or, if it has none, of what it was made from; "" if lines were not
    recorded.
    """
    while node is not None and "line" not in node.meta:
        node = next(iter(node.all_input_nodes), None)
    return "" if node is None else str(node.meta["line"])


def where(error: BaseException) -> str:
    """Return ' at file:line (code)' of the user's line that an error comes from, or ''."""
    skipped = (OURS, *library_prefixes())
    rows = reversed(traceback.extract_tb(error.__traceback__))
    users = (x for x in rows if not x.filename.startswith(skipped) and not of_python(x.filename))
    return next((at_line(x.filename, x.lineno or 0) for x in users), "")


def readable(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without library frames. If a library raised, the traceback ends at the user's line.

    With `ZEROFN_TRACEBACK=full` return all frames.
    """
    if full_tracebacks():
        return trace
    rows, libraries = [], library_prefixes()
    while trace is not None:
        rows.append(trace)
        trace = trace.tb_next
    kept = [row for row in rows if not _file(row).startswith(libraries)]
    if kept and kept[-1] is not rows[-1]:
        last = max((k for k, row in enumerate(kept) if not _file(row).startswith(OURS)), default=len(kept))
        kept = kept[: last + 1]
    return _linked(kept)


def full_tracebacks() -> bool:
    """Return whether tracebacks have the frames of ZeroFn and of torch, too."""
    return os.environ.get("ZEROFN_TRACEBACK") == "full"


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without ZeroFn's, torch's and Python's own frames.

    It stays as it is with `ZEROFN_TRACEBACK=full`, and if our code failed where it does not raise an error itself.
    """
    rows = []
    start = trace
    while trace is not None:
        rows.append(trace)
        trace = trace.tb_next
    last = linecache.getline(_file(rows[-1]), rows[-1].tb_lineno).strip() if rows else ""
    if full_tracebacks() or not rows or _file(rows[-1]).startswith(OURS) and not last.startswith("raise"):
        return start
    return _linked([row for row in rows if not _is_of_library(_file(row))])


def _is_of_library(file: str) -> bool:
    return file.startswith((OURS, *library_prefixes())) or of_python(file)


def _linked(rows: list[TracebackType]) -> TracebackType | None:
    out = None
    for row in reversed(rows):
        out = TracebackType(out, row.tb_frame, row.tb_lasti, row.tb_lineno)
    return out


def _file(row: TracebackType) -> str:
    return row.tb_frame.f_code.co_filename


def place_of(node: Node, program: Any, traced: Callable[[], Any]) -> str:
    """Return 'aten.addmm at file:line (code)' for a node of a scheduled program.

    `traced()` captures the program again with lines; its nodes have the same names, because passes preserve names. If
    the line cannot be found, return 'aten.addmm' alone.
    """
    if (call := call_of(node)) and is_region(call.body):
        first = next(x for x in call.body.graph.nodes if x.op == "call_function")
        return f"a region that begins with {place_of(first, program, traced)}"
    what = str(node.target).removesuffix(".default") if isinstance(node.target, OpOverload) else node.name
    with contextlib.suppress(Exception):
        if (name := node.meta.get(OUTLINED)) is not None:
            lines = (n.meta.get("line", "") for gm in graphs_of(traced().gm) for n in gm.graph.nodes if n.name == name)
            return what + next(lines, "")
        graphs = graphs_of(program.gm)
        again = traced().gm
        k = next(k for k, gm in enumerate(graphs) if gm.graph is node.graph)
        same = graphs_of(again)[k]
        return what + next((n.meta.get("line", "") for n in same.graph.nodes if n.name == node.name), "")
    return what
