"""A finished run as a picture: milliseconds a step and peak memory, a bar a system."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ZEROFN, PEER, ALONE = "#d1495b", "#6c8ebf", "#9a9a9a"
MB = 1e6


def colour(name: str) -> str:
    if name.startswith("ZeroFn"):
        return ZEROFN
    return ALONE if name == "one process" else PEER


def _bars(axes, rows: dict[str, Any], field: str, unit: float, left: list[float] | None) -> None:
    names = list(rows)
    values = [[v / unit for v in rows[name][field]] for name in names]
    middle = [statistics.median(v) for v in values]
    base = left or [0.0] * len(names)
    axes.barh(names, middle, left=base, color=[colour(n) for n in names], height=0.68, zorder=2)
    ends = [b + m for b, m in zip(base, middle, strict=True)]
    spread = [[m - min(v) for m, v in zip(middle, values, strict=True)],
              [max(v) - m for m, v in zip(middle, values, strict=True)]]  # fmt: skip
    if len(values[0]) > 1:
        whisker = {"fmt": "none", "ecolor": "#333333", "elinewidth": 1, "capsize": 2.5}
        axes.errorbar(ends, names, xerr=spread, **whisker)
    reach = max(e + s for e, s in zip(ends, spread[1], strict=True))
    for position, (end, above, value) in enumerate(zip(ends, spread[1], middle, strict=True)):
        axes.text(end + above + 0.012 * reach, position, f"{value:.0f}", va="center", fontsize=9)
    axes.set_xlim(0, 1.1 * reach)


def _dress(axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.grid(axis="x", color="#dddddd", zorder=0)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def draw(run: dict[str, Any], path: Path) -> None:
    """Write a PNG to `path`; whiskers span the rounds."""
    rows = run["rows"]
    figure, (time, memory) = pyplot.subplots(
        1, 2, figsize=(12, 1.6 + 0.36 * len(rows)), sharey=True, layout="constrained"
    )
    _bars(time, rows, "ms", 1.0, None)
    _dress(time, "ms per step")
    imports = [statistics.median(row["imports"]) / MB for row in rows.values()]
    memory.barh(list(rows), imports, color="#e3e3e3", height=0.68, zorder=2, label="imports")
    _bars(memory, rows, "beyond", MB, imports)
    _dress(memory, "peak RSS per rank, MB (grey: imports; number: what training adds)")
    time.invert_yaxis()
    for label, name in zip(time.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if name.startswith("ZeroFn") else "normal")
    figure.suptitle(
        f"Llama of {run['parameters'] / 1e6:.1f} M parameters, fp32, AdamW, {run['world']} gloo "
        f"ranks of one thread. Interleaved rounds: {run['num_rounds']}; median and range",
        fontsize=12,
    )
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
