"""What becomes of each key of a DeepSpeed configuration, as a table."""

from __future__ import annotations

import functools
import io
import os
import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from .deepspeed import from_deepspeed
from .deepspeed_file import check_keys, read
from .deepspeed_keys import flat, known, row_of, turned_off

_TABLE = 120  # columns of a terminal that has room for a table
_WORDS = {"mapped": "becomes", "decided": "decided", "none": "no meaning", "refused": "refused"}


def explained(config: str | os.PathLike[str] | Mapping[str, Any]) -> list[tuple[str, Any, str, str]]:
    """Return (key, value, what becomes of it in a word, the sentence) of each key of a configuration.

    Raises `ValueError` as `zerofn.from_deepspeed` does for a file that it cannot read and for an unknown key; keys
    that are refused are rows.
    """
    given = read(config)
    check_keys(given)
    rows = []
    for key, value in flat(given):
        row = row_of(key)
        assert row is not None
        off = row.fate == "refused" and turned_off(row, key, value, given)
        rows.append((key, value, "off" if off else _WORDS[row.fate], row.what))
    return rows


def every_key() -> list[tuple[str, Any, str, str]]:
    """Return the whole table: (key, DeepSpeed's default, what becomes of it in a word, the sentence)."""
    return [
        (x.key, x.default, _WORDS[x.fate], x.what + (f" (until {x.until})" if x.until else ""))
        for x in known().values()
    ]


def text(rows: list[tuple[str, Any, str, str]], head: str = "value", width: int | None = None) -> str:
    """Return rows for a terminal: as a table, or in fewer than 120 columns as a paragraph each. `width`: columns; the
    terminal's by default.
    """
    columns = width or Console().width
    if columns < _TABLE:
        return "\n".join(_paragraph(*row, head, columns) for row in rows)
    table = Table(box=None, pad_edge=False)
    for title, wraps in (("key", False), (head, True), ("here", False), ("what", True)):
        table.add_column(title, no_wrap=not wraps, overflow="fold")
    for key, value, word, what in rows:
        table.add_row(key, "" if value is None else str(value), word, what)
    out = io.StringIO()
    Console(file=out, width=columns, highlight=False, markup=False).print(table)
    return out.getvalue().rstrip()


def _paragraph(key: str, value: Any, word: str, what: str, head: str, width: int) -> str:
    """Return a row as its key, its value and what becomes of it, and the sentence below, indented."""
    given = "" if value is None else f" = {value}" if head == "value" else f" ({head} {value})"
    wrap = functools.partial(textwrap.fill, width=width, break_on_hyphens=False)
    first = wrap(f"{key}{given}: {word}", subsequent_indent="  ")
    return f"{first}\n{wrap(what, initial_indent='    ', subsequent_indent='    ')}"


def summary(config: str | os.PathLike[str] | Mapping[str, Any], auto: Mapping[str, Any], world: int) -> str:
    """Return the arguments that a configuration becomes, as code. Raises as `zerofn.from_deepspeed` does."""
    setup = from_deepspeed(config, auto=auto, world=world)
    shard = ", ".join(f"{name}={value!r}" for name, value in setup.shard.items())
    options = "".join(f", {name}={value!r}" for name, value in setup.compile.items())
    scale = "" if setup.loss_scale is None else f", loss_scale={setup.loss_scale!r}"
    rows = "" if setup.rows is None else f"  # {setup.rows} rows of a batch on each rank"
    return "\n".join(
        (
            f"tx = {setup.tx!r}",
            f"state = zerofn.shard(lambda: zerofn.TrainState.create(params=..., tx=tx{scale}), {shard})",
            f"loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), {setup.num_microbatches})(batch){rows}",
            f"state = state.apply_gradients(grads, on_nonfinite={setup.on_nonfinite!r})",
            f"step = zerofn.compile(train_step{options})",
        )
    )
