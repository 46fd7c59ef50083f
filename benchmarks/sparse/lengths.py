"""python -m benchmarks.sparse.lengths   (make bench): attention by layouts over length and density, in a picture.

Forward and backward of one row in float32, on one thread, as in `sparse.py`, which holds the figures at one length to
limits. Lengths double up to 16 k. Density is that of windows, from a few blocks to all of them, at one length. Writes
JSON and a picture, and what plans say of a small Llama's step on rows of 4 k to 64 k tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.func import functional_call

import zerofn
from benchmarks.common import report
from benchmarks.common.options import add_end
from benchmarks.sparse.sparse import DENSE, FLEX, GATHERED, HEADS, WIDTH, Attend, peaks, rows, timed
from zerofn import optim, sparse
from zerofn.ops import native

matplotlib.use("Agg")
from matplotlib import pyplot

LENGTHS = (1024, 2048, 4096, 8192, 16384)
WINDOWS = (64, 256, 512, 1024, 2048, 4096, 8192)  # tokens to each side
DRAWN = {
    DENSE: "#333333",
    "window of 1 k, sinks": "#d1495b",
    "documents of 1 k": "#e8a33d",
    "bigbird": "#6c8ebf",
    "16 blocks of 64, chosen": "#4b8f5a",
    GATHERED: "#9a9a9a",
    FLEX: "#b57edc",
}
MB = 1e6
PLANNED = (4096, 16384, 65536)
LLAMA = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,
}


def over_lengths(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of each row, by length."""
    found: dict[str, Any] = {}
    for length in options.lengths:
        every = {name: x for name, x in rows(length, options.flex).items() if name in DRAWN}
        memory = dict(peaks(length, [name for name in every if name != FLEX]))
        found[str(length)] = {"rows": timed(every, length, options.rounds), "memory": memory}
    return found


def over_density(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of windows, by their share of all tiles, beside dense attention's."""
    length = max(options.lengths) // 2
    patterns = {f"{w}": sparse.sliding_window(w) for w in WINDOWS if w <= length}
    shares = {name: sparse.layout(x, length, heads=HEADS).share for name, x in patterns.items()}

    def attend(pattern: sparse.Pattern) -> Attend:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sparse.attention(q, k, v, pattern)

        return run

    every = {DENSE: rows(length, False)[DENSE]} | {name: attend(x) for name, x in patterns.items()}
    return {"length": length, "shares": shares, "rows": timed(every, length, options.rounds)}


def planned() -> dict[str, Any]:
    """Operations of a Llama's step on one row, as plans count them, by length and layout."""
    config = hf.LlamaConfig(**LLAMA, use_cache=False)
    found: dict[str, Any] = {}
    for length in PLANNED:
        recent = (sparse.sinks(4) | sparse.sliding_window(1024)) & sparse.causal
        documents = sparse.documents(torch.arange(0, length + 1, 1024)) & sparse.causal
        layouts = {"causal": None, "window of 1 k, sinks, causal": recent, "documents of 1 k, causal": documents}
        found[str(length)] = {name: _operations(config, length, x) for name, x in layouts.items()}
    return found


def _operations(config: hf.LlamaConfig, length: int, layout: sparse.Pattern | None) -> float:
    model = zerofn.skeleton(lambda: hf.LlamaForCausalLM(config))
    if layout is not None:
        model = sparse.use(model, layout)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return functional_call(model, params, (), batch).loss

    def init_state() -> zerofn.TrainState:
        params = dict(hf.LlamaForCausalLM(config).named_parameters())
        return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3))

    def train_step(state: zerofn.TrainState, batch: Any) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    x = torch.zeros(1, length, dtype=torch.int64)
    asked = {"stage": 3, "offload": None, "precision": None, "remat": None, "world": 1, "machine": "H100"}
    (row,) = zerofn.plan(train_step, init_state, {"input_ids": x, "labels": x}, **asked)
    return float(row.plan.flops.model + row.plan.flops.again)


def table(run: Mapping[str, Any]) -> Table:
    """Milliseconds and megabytes by length."""
    out = Table(title=f"ms, and MB beside the inputs: {HEADS} heads of {WIDTH}, float32, 1 thread, {run['isa']}")
    lengths = run["lengths"]
    for name in ("", *(f"{int(n):,} tokens" for n in lengths)):
        out.add_column(name, justify="left" if not name else "right")
    for name in next(iter(lengths.values()))["rows"]:
        cells = []
        for found in lengths.values():
            ms = f"{1e3 * statistics.median(found['rows'][name]):.0f}"
            cells.append(f"{ms}, {found['memory'][name] / MB:.0f}" if name in found["memory"] else ms)
        out.add_row(name, *cells)
    return out


def draw(run: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: time and memory over length, and time over density."""
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    lengths = run["lengths"]
    for name, colour in DRAWN.items():
        times = {int(n): 1e3 * statistics.median(x["rows"][name]) for n, x in lengths.items() if name in x["rows"]}
        sizes = {int(n): x["memory"][name] / MB for n, x in lengths.items() if name in x["memory"]}
        style = {"color": colour, "marker": "o", "markersize": 4, "label": name}
        if times:
            left.plot(list(times), list(times.values()), **style)
        if sizes:
            middle.plot(list(sizes), list(sizes.values()), **style)
    density = run["density"]
    dense = statistics.median(density["rows"][DENSE])
    shares = list(density["shares"].values())
    of_dense = [statistics.median(density["rows"][name]) / dense for name in density["shares"]]
    right.plot([0, 1], [0, 1], color="#bbbbbb", linestyle=":", label="the share itself")
    right.plot(shares, of_dense, color=DRAWN["window of 1 k, sinks"], marker="o", markersize=4, label="windows")
    for axes, title in ((left, "ms, forward and backward"), (middle, "MB beside the inputs")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([int(n) for n in lengths], [f"{int(n) // 1024} k" for n in lengths])
        axes.set_xlabel("tokens")
        axes.set_title(title, loc="left", fontsize=11)
    right.set_title(f"time over that of dense attention, {density['length'] // 1024} k tokens", loc="left", fontsize=11)
    right.set_xlabel("share of tiles that are computed")
    right.legend(frameon=False)
    for axes in (left, middle, right):
        axes.grid(color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--flex", action="store_true", help="FlexAttention's forward pass, compiled")
    add_end(parser, "sparse_lengths.json")
    options, console = parser.parse_args(), Console(width=120 if not sys.stdout.isatty() else None)
    torch.set_num_threads(1)
    run: dict[str, Any] = {"surroundings": report.surroundings(), "isa": native.isa()}
    run |= {"lengths": over_lengths(options), "density": over_density(options), "planned": planned()}
    console.print(table(run))
    draw(run, options.out.with_suffix(".png"))
    return report.conclude(options.out, run, [], options.check)


if __name__ == "__main__":
    sys.exit(main())
