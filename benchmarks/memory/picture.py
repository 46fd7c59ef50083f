"""memory.py's run as a picture: step time against peak memory, a panel a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.picture import ZEROFN, pyplot
from benchmarks.common.report import MB, middle
from benchmarks.common.statistic import ratio
from benchmarks.memory.report import as_fast, ours
from benchmarks.memory.worker import COMPILED

STYLES = {  # marker, colour, what it is called
    "FSDP2": ("s", "#2f5d9b", "FSDP2, reshard_after_forward=True"),
    "FSDP2, kept": ("D", "#7fa3d6", "FSDP2, reshard_after_forward=False"),
    "DeepSpeed 3": ("^", "#e09f3e", "DeepSpeed 3, its defaults"),
    COMPILED: ("*", ZEROFN, "ZeroFn, compiled, without a budget"),
}
GREY, PALE = "#555555", "#eeeeee"
BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def _place(row: dict[str, Any]) -> tuple[float, float]:
    return row["peak"] / MB, middle(row["ms"])


def _peer(axes: Any, row: dict[str, Any], name: str) -> None:
    marker, colour, said = STYLES[name]
    x, y = _place(row)
    spread = [[y - min(row["ms"])], [max(row["ms"]) - y]]
    axes.errorbar([x], [y], yerr=spread, fmt="none", ecolor=colour, elinewidth=1, capsize=3, zorder=3)
    axes.plot([x], [y], marker, color=colour, markersize=10, markeredgecolor="white", zorder=5, label=said)


def _curve(axes: Any, rows: list[dict[str, Any]]) -> None:
    rows = sorted(rows, key=_place)  # a larger budget may need less
    x, y = zip(*map(_place, rows), strict=True)
    low, high = ([end(row["ms"]) for row in rows] for end in (min, max))
    axes.fill_between(x, low, high, color=ZEROFN, alpha=0.13, linewidth=0, zorder=2)
    axes.plot(x, y, "o-", color=ZEROFN, linewidth=2, markersize=6, markeredgecolor="white", zorder=4,
              label="ZeroFn, by its budget")  # fmt: skip


def _at_equal_memory(axes: Any, model: dict[str, Any]) -> None:
    """An arrow from FSDP2 to ZeroFn in the memory that FSDP2 needs."""
    if "FSDP2" not in model["alike"]:
        return
    theirs, alike = model["rows"]["FSDP2"], model["rows"][model["alike"]["FSDP2"]]
    start, end = _place(theirs), _place(alike)
    arrow = {"arrowstyle": "-|>", "color": GREY, "shrinkA": 8, "shrinkB": 6, "linewidth": 1.2}
    axes.annotate("", end, xytext=start, arrowprops=arrow, zorder=3)
    # Of one round, as in the table: medians of either alone drift apart on a busy machine.
    relative = ratio(alike["ms"], theirs["ms"]).median
    said = f"in the same memory\n{relative:.2f} of the time"
    below = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}  # where no curve is
    axes.text(end[0], 0.03, said, color=GREY, fontsize=9.5, zorder=6, **below)


def _at_equal_time(axes: Any, model: dict[str, Any]) -> None:
    """An arrow from FSDP2 to the left, to where ZeroFn is as fast with the least memory."""
    leanest = as_fast(model, "FSDP2")
    if leanest is None:
        return
    start, (x, _) = _place(model["rows"]["FSDP2"]), _place(leanest)
    arrow = {"arrowstyle": "-|>", "color": GREY, "shrinkA": 8, "shrinkB": 0, "linewidth": 1.2}
    axes.annotate("", (x, start[1]), xytext=start, arrowprops=arrow, zorder=3)
    said = f"no slower in\n{x / start[0]:.2f} of the memory"
    above = {"xytext": (-10, 6), "textcoords": "offset points", "ha": "right", "va": "bottom", "bbox": BOX}
    axes.annotate(said, start, color=GREY, fontsize=9.5, zorder=6, **above)  # near FSDP2: the curve is at the left


def _panel(axes: Any, model: dict[str, Any]) -> None:
    rows, every = list(ours(model).values()), list(model["rows"].values())
    _curve(axes, rows)
    for name in STYLES:
        _peer(axes, model["rows"][name], name)
    _at_equal_memory(axes, model)
    _at_equal_time(axes, model)
    state = max(row["resident"] for row in rows) / MB
    axes.axvspan(0, state, color=PALE, zorder=0)
    axes.text(state / 2, 0.5, "state", rotation=90, ha="center", va="center", color=GREY, fontsize=9.5,
              transform=axes.get_xaxis_transform())  # fmt: skip
    lowest, highest = min(min(row["ms"]) for row in every), max(max(row["ms"]) for row in every)
    axes.set_xlim(0, 1.06 * max(row["peak"] for row in every) / MB)
    axes.set_ylim(lowest - 0.35 * (highest - lowest), highest + 0.12 * (highest - lowest))
    title = f"{model['kind']} of {model['parameters'] / 1e6:.1f} M parameters, {len(rows)} budgets"
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("peak memory of a rank, MB of tensors", color=GREY)
    axes.set_axisbelow(True)
    axes.grid(color="#e4e4e4")
    axes.tick_params(length=0, colors=GREY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(run: dict[str, Any], path: Path) -> None:
    """Write a PNG to `path`; the band and the whiskers span the rounds."""
    models = run["models"].values()
    size = (2.2 + 5.4 * len(models), 5.6)
    figure, panels = pyplot.subplots(1, len(models), figsize=size, squeeze=False, layout="constrained")
    for axes, model in zip(panels[0], models, strict=True):
        _panel(axes, model)
    panels[0][0].set_ylabel("ms per step", color=GREY)
    handles, said = panels[0][0].get_legend_handles_labels()
    num_columns = 4 if len(models) > 1 else 2
    figure.legend(handles, said, loc="outside lower center", ncols=num_columns, frameon=False)
    figure.suptitle(
        f"A step's time and its memory: stage 3, fp32, AdamW, {run['world']} gloo ranks of one thread.\n"
        f"{run['num_rounds']} interleaved rounds; median and range",
        fontsize=11.5,
    )
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
