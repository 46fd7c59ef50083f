"""README and performance.md: ZeroFn beside other libraries, with a budget, compiled, and what it predicts."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from docs.results import GB, MB, Figure, Held, Key, Made, Piece, of


def of_performance() -> Iterator[Piece]:
    """Yield the pieces of performance.md about other libraries, budgets, compiled steps and predictions."""
    yield from _of_step()
    yield from _of_memory()
    yield from _of_compiled()
    yield from _of_predictions()
    yield from _of_frameworks()
    yield from _of_checkpoints()


def _of_step() -> Iterator[Piece]:
    def of_row(name: str) -> list[Figure]:
        at = ("rows", name)
        return [
            of("step", *at, "ms"), Key("step", (*at, "ms"), ("rows", "DDP", "ms")), of("step", *at, "beyond", unit=MB),
            of("step", *at, "state", unit=MB), of("step", *at, "wire", unit=MB),
        ]  # fmt: skip

    for name in ("DDP", "ZeroRedundancyOptimizer", "FSDP2", "FairScale", "DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3"):
        yield f"| {name} | {{:.0f}} | {{:.2f}} | {{:.0f}} | {{:.0f}} | {{:.0f}} |", of_row(name)
    for stage in range(4):
        name = f"ZeroFn {stage}"
        yield (
            f"| **{name}** | **{{:.0f}}** | **{{:.2f}}** | **{{:.0f}}** | **{{:.0f}}** | **{{:.0f}}** |\n",
            of_row(name),
        )
    ratios = ("ZeroFn 3 / FSDP2, ms/step", "ZeroFn 3 / DeepSpeed 3, ms/step")
    yield "| Intel Xeon | {:.2f} | {:.2f} | none |", [Held("step", x) for x in ratios]
    yield (
        "| AMD EPYC | {:.2f} | {:.2f} | {:.0f}, by {:.3f} to {:.3f} |",
        [
            *(Held("step_epyc", x) for x in ratios),
            *(Made("step_epyc", lambda d, how=how: how(_missed(d))) for how in (len, min, max)),
        ],
    )
    yield "may take at most {:.2f} times as long as DeepSpeed 3", [Held("step", ratios[1], "limit")]
    yield (
        "on one rank at most {:.2f} times as long",
        [Held("step", "one rank, small model, ZeroFn 3 / hand-written, ms/step", "limit")],
    )


def _missed(data: Any) -> list[float]:
    """By how much limits are missed."""
    return [x["measured"] - x["limit"] for x in data["must_hold"] if not x["kept"]]


def _of_memory() -> Iterator[Piece]:
    for words, what in (
        ("time, ZeroFn / FSDP2, in the same memory", "ms/step: ZeroFn / FSDP2, at the peak of FSDP2"),
        ("memory, ZeroFn / FSDP2, in the same time", "peak: ZeroFn / FSDP2, at the step time of FSDP2"),
        (
            "memory, ZeroFn / DeepSpeed 3, in the same time",
            "peak: ZeroFn / DeepSpeed 3, at the step time of DeepSpeed 3",
        ),
    ):
        yield f"| {words} | {{:.2f}} | {{:.2f}} |", [Held("memory", f"{model}, {what}") for model in ("Llama", "T5")]
    yield ("compiled: time, ZeroFn / FSDP2 | {:.2f} | {:.2f} |", [_of_fsdp2(model) for model in ("llama", "t5")])
    yield (
        "compiled: measured peak / planned peak | {:.3f} | {:.3f} |",
        [Held("memory", f"{model}, compiled: measured peak / planned") for model in ("Llama", "T5")],
    )
    yield (
        'takes {:.2f} times as long. With `remat="auto"`, it stores a half and takes {:.2f} times as long.',
        [Held("memory", f"GPT-2, remat='{x}': ms/step / without") for x in ("full", "auto")],
    )
    yield (
        "for ZeroFn at budgets from {:.0f} to {:.0f} MB",
        [of("memory", "models", "llama", x, unit=MB) for x in ("least", "ample")],
    )


def _of_fsdp2(model: str) -> Figure:
    at = ("models", model, "rows")
    return Key("memory", (*at, "ZeroFn 3, compiled", "ms"), (*at, "FSDP2", "ms"))


def _of_compiled() -> Iterator[Piece]:
    first = "first call, 24 layers"
    for words, name in (
        ("without compiling", "eager"), ("with compiling", "cold"), ("with compiled regions on disk", "warm"),
    ):  # fmt: skip
        yield f"| {words} | {{:.1f}} s |", [of("compiled", "rows", first, name)]
    for words, row in (
        ("small tensors: width 64, 4 layers, 64 tokens", "width 64, 4 layers, 64 tokens"),
        ("width 256, 512 tokens", "width 256, 4 layers, 512 tokens"),
        ("the same in bfloat16", "width 256, 4 layers, 512 tokens, bf16"),
    ):
        yield f"| {words} | {{:.2f}} |", [Key("compiled", ("rows", row, "inductor"), ("rows", row, "eager"))]
    compiled = ("rows", "ZeroFn 3, compiled", "ms")
    yield (
        "takes {:.2f} times as long as uncompiled, and {:.2f} times as long as FSDP2 with compiled layers",
        [Key("step_compiled", compiled, ("rows", x, "ms")) for x in ("ZeroFn 3", "FSDP2, compiled")],
    )


def _of_frameworks() -> Iterator[Piece]:
    for name, file in (("Trainer", "trainer"), ("Lightning", "lightning")):
        for stage in (2, 3):
            row = [
                of(file, "rows", f"DeepSpeed {stage}", "ms"),
                of(file, "rows", f"DeepSpeed {stage}", "peak", unit=MB),
            ]
            yield f"| {name}, DeepSpeed {stage} | {{:.0f}} | {{:.0f}} | | |", [*row]
            row = [of(file, "rows", f"ZeroFn {stage}", "ms"), of(file, "rows", f"ZeroFn {stage}", "peak", unit=MB)]
            held = [Held(file, f"stage {stage}, {x}: ZeroFn / DeepSpeed") for x in ("ms/step", "peak")]
            yield (
                f"| **{name}, ZeroFn {stage}** | **{{:.0f}}** | **{{:.0f}}** | **{{:.2f}}** | **{{:.2f}}** |",
                [*row, *held],
            )


def _of_checkpoints() -> Iterator[Piece]:
    yield "A state of {:.2f} GB", [of("checkpoint", "bytes", unit=GB)]

    def row(name: str) -> list[Figure]:
        at = ("rounds", name)
        return [
            of("checkpoint", *at, "save"), of("checkpoint", *at, "load"), of("checkpoint", *at, "load_memory", unit=MB),
            Key("checkpoint", (*at, "blocked"), (*at, "memcpy")),
        ]  # fmt: skip

    yield "| fio (a disk benchmark), the same bytes | {:.2f} | {:.2f} | | | | |", row("fio")[:2]
    yield "| torch DCP | {:.2f} | {:.2f} | {:.0f} | {:.2f} | | nothing |", row("torch DCP")
    yield "| DeepSpeed 3 | {:.2f} | {:.2f} | {:.0f} | {:.2f} | |", row("DeepSpeed")
    yield (
        "| **ZeroFn 3** | **{:.2f}** | **{:.2f}** | **{:.0f}** | **{:.2f}** | **{:.2f}** | **nothing** |",
        [*row("ZeroFn"), of("checkpoint", "rounds", "ZeroFn", "in_flight")],
    )


def _of_foresight(data: Any) -> list[float]:
    """Predicted over measured seconds of each row, the median of its rounds."""
    rows = [x for model in data["rows"].values() for x in model.values()]
    return [median(a / b for a, b in zip(x["predicted"], x["measured"], strict=True)) for x in rows]


def off_plans() -> Figure:
    """Return by how much a measured peak is off the planned one at most, in percent."""
    return Made(
        "foresight",
        lambda d: max(100 * abs(x["peak"] / x["planned"] - 1) for rows in d["rows"].values() for x in rows.values()),
    )


def _of_predictions() -> Iterator[Piece]:
    yield "| peak memory | within {:.1f} %", [off_plans()]
    yield (
        "| time of a step | {:.2f} to {:.2f}, median {:.2f} |",
        [Made("foresight", lambda d, how=how: how(_of_foresight(d))) for how in (min, max, median)],
    )


def of_readme() -> Iterator[Piece]:
    """Yield the pieces of README."""
    row = lambda x: [of("step", "rows", x, "ms"), of("step", "rows", x, "beyond", unit=MB)]  # noqa: E731
    yield (
        "ZeroFn at stage 3 takes {:.0f} ms per step and {:.0f} MB per rank, FSDP2 takes {:.0f} ms and {:.0f} MB, "
        "and DeepSpeed at stage 3 takes {:.0f} ms and {:.0f} MB",
        [*row("ZeroFn 3"), *row("FSDP2"), *row("DeepSpeed 3")],
    )
