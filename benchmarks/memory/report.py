"""memory.py's run as tables, and what must hold of it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from benchmarks.common.limits import Check
from benchmarks.common.report import MB, middle
from benchmarks.common.statistic import ratio
from benchmarks.memory.worker import COMPILED

BESIDE = ("FSDP2", "DeepSpeed 3")  # at whose memory and time ZeroFn must do better
NOISE = 1.05  # of a step's time, from a group of budgets to the next larger ones: the median of that ratio
GROUPS = 4
PLANNED = 1.005  # measured over planned, compiled
LEAST_OF_ACTIVATIONS, FULL, AUTO, HALF = 1 / 5, 1.40, 1.25, 1 / 2

Rows = dict[str, dict[str, Any]]


def ours(model: dict[str, Any]) -> Rows:
    """ZeroFn's rows, by budget."""
    rows = {name: row for name, row in model["rows"].items() if row["budget"] is not None}
    return dict(sorted(rows.items(), key=lambda pair: pair[1]["budget"]))


def as_fast(model: dict[str, Any], peer: str) -> dict[str, Any] | None:
    """ZeroFn's row of the least peak among those no slower than a peer, by the median of ratios of one round."""
    theirs = model["rows"][peer]["ms"]
    rows = [row for row in ours(model).values() if ratio(row["ms"], theirs).median <= 1]
    return min(rows, key=lambda row: row["peak"], default=None)


def checks(run: dict[str, Any]) -> list[Check]:
    found = []
    for model in run["models"].values():
        found += [*_kept(model), *(check for peer in BESIDE for check in _beside(model, peer))]
    return [*found, *_remat(run["remat"]["rows"])]


def _kept(model: dict[str, Any]) -> Iterator[Check]:
    kind, rows = model["kind"], list(ours(model).values())
    fullest = max(row["between"] / row["budget"] for row in rows)
    yield Check(f"{kind}, {len(rows)} budgets: measured peak / budget", f"{fullest:.5f}", fullest, 1.0)
    different = len({digest for row in rows for digest in row["parameters"]})
    yield Check(f"{kind}: different parameters after training at all budgets", str(different), different, 1.0)
    if (compiled := model["rows"].get(COMPILED)) is not None:
        share = compiled["between"] / compiled["predicted"]
        yield Check(f"{kind}, compiled: measured peak / planned", f"{share:.5f}", share, PLANNED)
    whole = ratio(rows[-1]["ms"], rows[0]["ms"])
    yield Check(f"{kind}, ms/step: largest budget / least", str(whole), whole.median, 1.0, strict=True)
    means = list(_groups(rows))
    rise = max((ratio(more, less) for less, more in itertools.pairwise(means)), key=lambda x: x.median)
    what = f"{kind}, ms/step: each of {len(means)} groups of budgets / the one below"
    yield Check(what, str(rise), rise.median, NOISE)


def _groups(rows: list[dict[str, Any]]) -> Iterator[list[float]]:
    """Budgets in groups, the least ones first: the mean time of a group's steps, round by round."""
    for k in range(GROUPS):
        group = rows[k * len(rows) // GROUPS : (k + 1) * len(rows) // GROUPS]
        yield [statistics.mean(of_round) for of_round in zip(*(row["ms"] for row in group), strict=True)]


def _beside(model: dict[str, Any], peer: str) -> Iterator[Check]:
    kind, rows, theirs = model["kind"], model["rows"], model["rows"][peer]
    what = f"{kind}, ms/step: ZeroFn / {peer}, at the peak of {peer}"
    alike = rows.get(model["alike"].get(peer))
    if alike is None or alike["peak"] > theirs["peak"]:
        yield Check(what, "no such budget", float("inf"), 1.0, strict=True)
    else:
        value = ratio(alike["ms"], theirs["ms"])
        yield Check(what, str(value), value.median, 1.0, strict=True)
    what = f"{kind}, peak: ZeroFn / {peer}, at the step time of {peer}"
    leanest = as_fast(model, peer)
    share = leanest["peak"] / theirs["peak"] if leanest else float("inf")
    yield Check(what, f"{share:.3f}" if leanest else "never as fast", share, 1.0, strict=True)


def _remat(rows: Rows) -> Iterator[Check]:
    none, full, auto = (rows[how] for how in ("none", "full", "auto"))
    for row, how, limit in ((full, "full", LEAST_OF_ACTIVATIONS), (auto, "auto", HALF)):
        share = row["activations"] / none["activations"]
        yield Check(f"GPT-2, remat={how!r}: activations / without", f"{share:.3f}", share, limit)
    for row, how, limit in ((full, "full", FULL), (auto, "auto", AUTO)):
        value = ratio(row["ms"], none["ms"])
        yield Check(f"GPT-2, remat={how!r}: ms/step / without", str(value), value.median, limit)
    different = len({row["parameters"] for row in rows.values()})
    yield Check("GPT-2: different parameters after training", str(different), different, 1.0)


def tables(run: dict[str, Any]) -> Iterator[Table]:
    for model in run["models"].values():
        yield _model_table(run, model)
    yield _remat_table(run["remat"])


def _model_table(run: dict[str, Any], model: dict[str, Any]) -> Table:
    table = Table(
        title=f"{model['kind']} of {model['parameters'] / 1e6:.1f} M parameters, fp32, AdamW, stage 3, {run['world']} "
        f"gloo ranks of one thread, {run['num_rounds']} rounds of {run['num_steps']} steps",
        caption="MB of a rank. peak: bytes of tensors, with what operations take for themselves; between: while none\n"
        "runs, which is what a budget is for. Buffers count as far as they were ever touched: DeepSpeed allocates\n"
        "2 GB more. RSS: a process's peak beyond its imports, in one of its own. Ratio: to FSDP2 in the same round,\n"
        "median, with its 95 % interval. In brackets: the peer whose peak this is.",
    )
    table.add_column("system", no_wrap=True)
    for name in ("peak\nMB", "between\nMB", "RSS\nMB", "ms/step", "ratio to FSDP2", "sent\nMB", "compile\ns"):
        table.add_column(name, justify="right", no_wrap=True)
    peers = {name: row for name, row in model["rows"].items() if row["budget"] is None}
    alike: dict[str, list[str]] = {}
    for peer, name in model["alike"].items():
        alike.setdefault(name, []).append(peer)
    for name, row in (ours(model) | peers).items():
        own = row["budget"] is not None
        table.add_row(
            name + (f"  ({'; '.join(alike[name])})" if name in alike else ""),
            f"{row['peak'] / MB:.1f}",
            f"{row['between'] / MB:.1f}" if own else "-",
            "-" if row["beyond"] is None else f"{row['beyond'] / MB:.0f}",
            f"{middle(row['ms']):.0f}",
            str(ratio(row["ms"], peers["FSDP2"]["ms"])),
            f"{row['sent'] / MB:.1f}" if own else "-",
            f"{row['seconds']:.1f}" if own else "-",
            style="bold green" if name in alike else "green" if own else None,
        )
    return table


def _remat_table(found: dict[str, Any]) -> Table:
    table = Table(
        title=f"GPT-2 of {found['layers']} layers, {found['parameters'] / 1e6:.1f} M parameters, dropout 0.1, one rank",
        caption="MB: the most of activations at any moment, by the plan;\nthe step's peak, measured.",
    )
    for name in ("remat", "activations\nMB", "peak\nMB", "ms/step", "ratio to none", "compile\ns"):
        table.add_column(name, justify="left" if name == "remat" else "right")
    for how, row in found["rows"].items():
        relative = ratio(row["ms"], found["rows"]["none"]["ms"])
        table.add_row(
            how,
            f"{row['activations'] / MB:.1f}",
            f"{row['peak'] / MB:.1f}",
            f"{statistics.median(row['ms']):.0f}",
            str(relative),
            f"{row['seconds']:.1f}",
        )
    return table
