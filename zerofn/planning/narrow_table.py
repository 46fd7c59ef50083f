"""A table of plans in 80 columns: columns for what differs between its rows, a title for what all rows share."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence

from ..comm.axes import KINDS as KINDS_OF_AXES
from ..cost.simulator import limit_in_words
from ..graph.liveness import KINDS
from ..util.sizes import in_words, time_in_words
from .plan_row import Config, Row, along, in_short
from .wide_table import precision_of

WIDTH = 80
_AMOUNT = re.compile(r"(\d) (\w?B|m?s|\w?bit/s)\b")
_FIRST_OUT = ("step", "host", "drives", "remat", "batch")  # columns that a table leaves out if it is too wide
_SHORTER = {
    " of device memory too little": " short",
    " of memory too little": " short",
    " of host memory too little": " short on the host",
    " of room on drives too little": " short on drives",
    " for the state alone": "",
    "it needs at least": "needs at least",
}  # a column has less room than a sentence


def shared(rows: Sequence[Row]) -> str:
    """Return what all rows have in common, for the title: axes of the mesh, the precision, and the rows of a batch."""
    alike, _ = _axes(rows)
    told = [",".join(f"{name}={n}" for name, n in alike.items())]
    told += [x.pop() for x in ({*map(precision_of, rows)}, {*map(_batch, rows)}) if len(x) == 1]
    return "".join(f"; {x}" for x in told if x)


def narrow_lines(rows: Sequence[Row], best: Row | None) -> list[str]:
    """Return the head and a line for each row, the best one with a star."""
    columns = narrow_columns(rows)
    for name in _FIRST_OUT:
        if sum(2 + max(map(len, x)) for x in columns) > WIDTH:
            columns = [x for x in columns if x[0] != name]
    widths = [max(map(len, x)) for x in columns]
    marks = [" ", *("*" if row is best else " " for row in rows)]
    lines = []
    for mark, cells in zip(marks, zip(*columns, strict=True), strict=True):
        *numbers, last = zip(cells, widths, strict=True)
        lines.append("  ".join([f"{mark} " + "  ".join(x.rjust(w) for x, w in numbers), last[0]]).rstrip())
    return lines


def details_of(row: Row) -> list[str]:
    """Return what a wide table has in columns of its own, of one row."""
    peak = ", ".join(f"{kind} {in_words(row.peak[kind])}" for kind in KINDS if row.peak.get(kind))
    name = row.config.label(with_rows=False)
    out = [f"{name}, bytes at the peak: {peak}"] if peak else []
    if row.pipelined is not None:
        out.append(f"pipeline: {row.pipelined}")
    if not row.bound:
        return out
    return [*out, f"a rank sends {along(row.sent) or 'nothing'} a step; {limit_in_words(row.bound)}"]


def remat_in_words(rows: Iterable[Row]) -> list[str]:
    """Return what the ways of recomputation in a table are called elsewhere."""
    told = {
        "auto": "remat auto: selective recomputation, of the activations that are cheapest to compute again",
        "full": "remat full: recomputation of all activations but those between units, usually layers",
        "budget": "remat budget: compile(memory=...), which recomputes whatever costs least",
    }
    found = {row.config.remat for row in rows}
    return [text for how, text in told.items() if how in found]


def filled(text: str, indent: str = "") -> str:
    """Return a text in lines of 80 characters."""
    after = f"{indent}  " if indent else ""
    wrapper = textwrap.TextWrapper(WIDTH, indent, after, break_long_words=False, break_on_hyphens=False)
    joined = _AMOUNT.sub("\\1\xa0\\2", text)  # a number stays with its unit
    return wrapper.fill(joined).replace("\xa0", " ")


def code_of(config: Config) -> str:
    """Return the code of a row, in lines of at most 80 characters if its names are short enough."""
    return "\n".join(_code(x, 0) for x in ast.parse(config.call()).body)


def narrow_columns(rows: Sequence[Row]) -> list[list[str]]:
    """Return columns, each with its head first, without those that say nothing or the same in all rows."""
    unit = next((row.unit for row in rows if row.bound), "tokens")
    columns = [[name, *(str(row.config.sizes.get(name, 1)) for row in rows)] for name in _axes(rows)[1]]
    head = ("stage", "offload", "precision", "remat", "batch", "device", "host", "drives", "step", f"{unit}/s", "")
    found = [list(x) for x in zip(head, *map(_cells, rows), strict=True)]
    alike = {"precision", "batch"}
    return columns + [
        x for x in found if x[0] in ("stage", "") or any(c.strip("-") for c in x[1:])
        and not (x[0] in alike and len(set(x[1:])) == 1)
    ]  # fmt: skip


def _axes(rows: Sequence[Row]) -> tuple[dict[str, int], list[str]]:
    """Return the axes that have the same size in all rows, with their sizes, and those with several sizes."""
    if not any(row.config.on_axes for row in rows):
        return {}, []
    sizes = {name: {x.config.sizes.get(name, 1) for x in rows} for row in rows for name in row.config.sizes}
    ordered = [name for name in KINDS_OF_AXES if name in sizes]
    return {x: sizes[x].pop() for x in ordered if len(sizes[x]) == 1}, [x for x in ordered if len(sizes[x]) > 1]


def _cells(row: Row) -> list[str]:
    c, about = row.config, "~ " if row.estimate is not None else ""
    stage = f"{c.stage} hpz" if c.again else str(c.stage)
    host, drives = (in_words(n) if n else "" for n in row.needs[1:])
    device = f"{about if row.bound else '> '}{in_words(row.needs.device)}"
    took, rate = (f"{about}{time_in_words(row.seconds)}", f"{about}{row.speed:,.0f}") if row.bound else ("", "")
    ways = in_short(c.offload), precision_of(row), c.remat or "-", str(c.rows)
    return [stage, *ways, device, host, drives, took, rate, _verdict(row)]


def _verdict(row: Row) -> str:
    text = row.lacks or "fits"
    for sentence, short in _SHORTER.items():
        text = text.replace(sentence, short)
    return text


def _batch(row: Row) -> str:
    return f"{row.config.rows} row{'s' * (row.config.rows != 1)} a rank"


def _code(node: ast.stmt | ast.expr | ast.keyword, indent: int, after: str = "") -> str:
    """Return a statement or an argument; a call that is too long has its arguments on lines of their own."""
    before = ""
    value: ast.AST = node
    if isinstance(node, ast.Assign):
        before, value = f"{ast.unparse(node.targets[0])} = ", node.value
    elif isinstance(node, ast.keyword):
        before, value = f"{node.arg}=", node.value
    space = " " * indent
    flat = f"{space}{before}{ast.unparse(value)}{after}"
    if len(flat) <= WIDTH or not isinstance(value, ast.Call):
        return flat
    arguments: list[ast.expr | ast.keyword] = [*value.args, *value.keywords]
    inner = f"{space}    {', '.join(map(ast.unparse, arguments))}"
    lines = [inner] if len(inner) <= WIDTH else [_code(x, indent + 4, ",") for x in arguments]
    return "\n".join([f"{space}{before}{ast.unparse(value.func)}(", *lines, f"{space}){after}"])
