"""python -m benchmarks.sparse.sparse   (make bench): attention by layouts, beside dense attention of the same tokens.

Forward and backward of one row in float32. Each round runs every row once, in an order that rotates, forwards and
backwards in turn; ratios are of one round. A row is to take 1.3 times its share of dense attention's time, and 5 ms; at
full density 1.15 times. Memory is what a process of its own adds at most to what it has with its inputs, the less of
two processes: some read pages of libraries again. FlexAttention has no backward pass on CPUs, so its forward pass
stands beside (`--flex`); gathered blocks are a step's blocks through torch's dense attention.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.common.measure import memory_bytes
from benchmarks.common.options import add_end
from benchmarks.common.statistic import ratio
from benchmarks.common.turns import in_turn
from zerofn import sparse
from zerofn.ops import native

HEADS, WIDTH, BLOCK, CHOSEN = 4, 64, 64, 16
DENSE, OURS, GATHERED, FLEX = (
    "dense, torch",
    "everything",
    "16 blocks of 64, gathered",
    "window, FlexAttention, forward",
)
SHARE, MORE, FULL, MEMORY = 1.3, 5e-3, 1.15, 1.1  # of dense attention's time, and seconds; of its memory
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def patterns(length: int) -> dict[str, sparse.Pattern]:
    """The layouts of the table."""
    ends = torch.arange(0, length + 1, min(1024, length))
    return {
        OURS: sparse.everything,
        "causal": sparse.causal,
        "window of 1 k, sinks": sparse.sliding_window(1024) | sparse.sinks(4),
        "window of 1 k, sinks, causal": (sparse.sliding_window(1024) | sparse.sinks(4)) & sparse.causal,
        "documents of 1 k": sparse.documents(ends),
        "bigbird": sparse.deepspeed.bigbird(64, num_random_blocks=3, num_sliding_window_blocks=5, num_global_blocks=2),
        "bigbird, blocks of 16": sparse.deepspeed.bigbird(16, num_random_blocks=3, num_sliding_window_blocks=9),
    }


def index_of(length: int) -> Tensor:
    """Blocks that a step might choose: 16 of all, for each head and block of queries."""
    blocks = -(-length // BLOCK)
    draw = torch.Generator().manual_seed(0)
    return torch.rand(1, HEADS, blocks, blocks, generator=draw).argsort(-1)[..., : min(CHOSEN, blocks)]


def gathered(index: Tensor) -> Attend:
    """Blocks by torch alone: gathered, then dense attention of each block of queries."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = [x.unflatten(2, (-1, BLOCK)) for x in (q, k, v)]
        at = index.flatten(2)[..., None, None].expand(-1, -1, -1, BLOCK, WIDTH)
        k, v = (x.gather(2, at).unflatten(2, index.shape[2:]).flatten(3, 4) for x in blocks[1:])
        q, k, v = (x.flatten(0, 2)[:, None] for x in (blocks[0], k, v))
        return F.scaled_dot_product_attention(q, k, v).view(1, HEADS, -1, WIDTH)

    return attend


def flex(length: int) -> Attend:
    """FlexAttention of a window of 1 k, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: (q - k).abs() < 1024, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=mask)

    return attend


def rows(length: int, with_flex: bool) -> dict[str, Attend]:
    """Each row of the table."""
    index = index_of(length)
    found: dict[str, Attend] = {DENSE: F.scaled_dot_product_attention}
    found |= {name: lambda q, k, v, p=p: sparse.attention(q, k, v, p) for name, p in patterns(length).items()}
    found["16 blocks of 64, chosen"] = lambda q, k, v: sparse.attention(q, k, v, sparse.chosen(index, BLOCK))
    found[GATHERED] = gathered(index)
    return found | ({FLEX: flex(length)} if with_flex else {})


def share_of(name: str, length: int) -> float | None:
    """The part of all pairs of tokens in the blocks of a row."""
    if name in patterns(length):
        pattern = patterns(length)[name]
        if name.startswith("documents"):
            return min(1024, length) / length
        return sparse.layout(pattern, length, heads=HEADS).share
    return min(1.0, CHOSEN * BLOCK / length) if "16 blocks" in name else None


def inputs(length: int) -> list[Tensor]:
    """q, k, v and a gradient, as a layer has them: a token's heads side by side."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(1, length, HEADS, WIDTH, generator=draw).transpose(1, 2) for _ in range(4)]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def both_ways(name: str, attend: Attend, given: list[Tensor]) -> None:
    """Run a row once."""
    *qkv, grad = given
    if name == FLEX:
        attend(*(x.detach() for x in qkv))
        return
    torch.autograd.grad(attend(*qkv), qkv, grad)


def timed(every: Mapping[str, Attend], length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each row, one a round, after one that does not count."""
    given, names = inputs(length), list(every)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in in_turn(names, number):
            began = time.perf_counter()
            both_ways(name, every[name], given)
            if number:
                found[name].append(time.perf_counter() - began)
    return found


def peaks(length: int, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Bytes that each row adds at most, in a process of its own."""
    for name in names:
        command = [sys.executable, "-m", "benchmarks.sparse.sparse", "--length", str(length), "--peak-of", name]
        printed = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
        yield name, min(int(x.split()[-1]) for x in printed)


def peak_of(name: str, length: int) -> int:
    """Bytes that a row adds at most in this process, layouts included."""
    both_ways(name, rows(512, False)[name], inputs(512))  # what the first call of anything brings
    given, before = inputs(length), memory_bytes("VmRSS")
    both_ways(name, rows(length, False)[name], given)
    return memory_bytes("VmHWM") - before


def table(found: dict[str, list[float]], memory: dict[str, int], length: int) -> Table:
    """The table of a run."""
    out = Table(title=f"{length:,} tokens, {HEADS} heads of {WIDTH}, float32, 1 thread, {native.isa()}")
    for name in ("", "blocks", "ms", "of dense", "of its share", "MB"):
        out.add_column(name, justify="left" if not name else "right")
    for name, seconds in found.items():
        share, time_ = share_of(name, length), ratio(seconds, found[DENSE])
        cost = "" if share is None else f"{time_.median / share:.2f}"
        part = "" if share is None else f"{100 * share:.1f} %"
        size = f"{memory[name] / 1e6:.0f}" if name in memory else ""
        out.add_row(name, part, f"{1e3 * statistics.median(seconds):.0f}", str(time_), cost, size)
    return out


def checks(found: dict[str, list[float]], memory: dict[str, int], length: int) -> list[Check]:
    """What must hold."""
    out = []
    for name, seconds in found.items():
        share = share_of(name, length)
        if share is None or name in (GATHERED, FLEX):
            continue
        limit, more = (FULL, 0.0) if name == OURS else (SHARE * share, MORE)
        time_ = ratio([max(0.0, x - more) for x in seconds], found[DENSE])
        out.append(Check(f"{name}: time of dense attention's", str(time_), time_.median, limit))
        if name in memory:
            part = memory[name] / memory[DENSE]
            out.append(Check(f"{name}: memory of dense attention's", f"{part:.2f}", part, MEMORY))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--flex", action="store_true", help="FlexAttention's forward pass, compiled")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    add_end(parser, "sparse.json")
    options, console = parser.parse_args(), Console(width=120 if not sys.stdout.isatty() else None)
    torch.set_num_threads(1)
    if options.peak_of:
        print(peak_of(options.peak_of, options.length))
        return 0
    memory, found = (
        dict(peaks(options.length, rows(options.length, False))),
        timed(rows(options.length, options.flex), options.length, options.rounds),
    )
    held = checks(found, memory, options.length)
    console.print(table(found, memory, options.length))
    console.print(report.check_table(held))
    run: dict[str, Any] = {"surroundings": report.surroundings(), "isa": native.isa(), "length": options.length}
    return report.conclude(options.out, {**run, "rows": found, "memory": memory}, held, options.check)


if __name__ == "__main__":
    sys.exit(main())
