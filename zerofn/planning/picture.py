"""Pictures of a step's memory over time."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..graph.liveness import KINDS, Moment

_COLOURS = dict(zip(KINDS, ("#6b7280", "#5e81ac", "#bf616a", "#a3be8c", "#d08770", "#c8ccd4", "#ebcb8b"), strict=True))
_BLACK = "#2e3440"  # of lines
MB, GB = 1e6, 1e9
FAR = 8  # times the need: a limit beyond that is not drawn
File = str | os.PathLike[str] | io.BytesIO


def draw(
    moments: Sequence[Moment], sent: Sequence[int], file: File, *, title: str, measured: Sequence[int] = ()
) -> None:
    """Draw the bytes on the device while each operation of a step runs, by kind, with the starts of transfers below.

    `sent`: the indices of operations that start transfers to other ranks. The file's ending names the format; a
    file object gets SVG. `measured`: bytes that were allocated, drawn as a line. Raises `ImportError` if matplotlib
    is missing.
    """
    figure, axes = _pyplot().subplots(figsize=(9, 4), layout="constrained")
    shown = [kind for kind in KINDS if any(x.live[kind] for x in moments)]
    axes.stackplot(
        range(len(moments)),
        [[x.live[kind] / MB for x in moments] for kind in shown],
        labels=shown,
        step="post",
        colors=[_COLOURS[kind] for kind in shown],
        linewidth=0,
    )
    most = max(x.nbytes for x in moments) / MB
    if measured:
        axes.plot(range(len(measured)), [n / MB for n in measured], color=_BLACK, linewidth=0.8, label="measured")
    axes.plot(sent, [-0.03 * most] * len(sent), "|", color="#b48ead", label="transfers", markersize=5)
    axes.set_title(f"{title}: {most:,.1f} MB at its peak", loc="left", fontsize=10.5)
    axes.set(
        xlabel="operations of a step, in order",
        ylabel="MB of a rank",
        xlim=(0, len(moments)),
        ylim=(-0.06 * most, 1.05 * most),
    )
    handles, labels = axes.get_legend_handles_labels()
    kinds = len(shown)
    axes.legend(
        handles[:kinds][::-1] + handles[kinds:],
        labels[:kinds][::-1] + labels[kinds:],
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
    )
    _save(figure, axes, file)


def draw_rows(
    labels: Sequence[str],
    peaks: Sequence[dict[str, int]],
    notes: Sequence[str],
    limit: float,
    file: File,
    *,
    title: str,
) -> None:
    """Draw a bar for each row, its bytes by kind, with a note, and a line at `limit` bytes, unless that is far beyond
    all rows.

    Raises `ImportError` if matplotlib is missing.
    """
    figure, axes = _pyplot().subplots(figsize=(9, 1.2 + 0.32 * len(labels)), layout="constrained")
    where, most = range(len(labels)), max((sum(peak.values()) for peak in peaks), default=0)
    name, unit = ("GB", GB) if most >= GB else ("MB", MB)
    ends = [0.0] * len(labels)
    for kind in KINDS:
        widths = [peak.get(kind, 0) / unit for peak in peaks]
        if any(widths):
            axes.barh(where, widths, left=ends, color=_COLOURS[kind], label=kind)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    if near := limit < FAR * most:
        axes.axvline(limit / unit, color=_BLACK, linewidth=1, linestyle="--", label="there is")
    right = (max(limit, most) if near else most) / unit
    for k, note in enumerate(notes):
        axes.text(ends[k] + 0.01 * right, k, note, va="center", fontsize=8)
    axes.set_yticks(where, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set(
        xlabel=f"{name} of a device at the step's peak, of {limit / unit:,.0f} {name} available", xlim=(0, 1.25 * right)
    )
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    _save(figure, axes, file)


def _save(figure: Any, axes: Any, file: File) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    page = isinstance(file, io.BytesIO)  # which has a background of its own
    figure.savefig(file, format="svg" if page else None, transparent=page)
    _pyplot().close(figure)


def page(body: str, draw_to: Callable[[File], None]) -> str:
    """Return HTML for notebooks: `body` and, if matplotlib is installed, the drawing of `draw_to`."""
    out = io.BytesIO()
    with contextlib.suppress(ImportError):
        draw_to(out)
    svg = out.getvalue().decode()
    fitting = svg[svg.find("<svg") :].replace("<svg", '<svg style="max-width:100%;height:auto;fill:currentColor"', 1)
    for black in ("#000000", _BLACK):  # in the colour of the page's text, whether the page is light or dark
        fitting = fitting.replace(black, "currentColor")
    return f"<div>{body}{fitting}</div>"


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("pictures are drawn with matplotlib: pip install 'zerofn[plots]'.") from None
    return pyplot
