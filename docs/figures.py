"""The figures in README and on the site, each named by its key in a file of `benchmarks/results`.

    python -m docs.figures      # writes the figures of today's result files into the pages

`KEYS` has pieces of the pages' text. Where a piece has a gap, such as `{:.2f}`, the page has the figure of the next
key. A test compares the pages with the result files.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median
from typing import Any

from docs.results import GB, MB, ROOT, Figure, Held, Key, Made, Piece, filled, of


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
    yield (
        "| Intel Xeon | {:.2f} | {:.2f} | none |",
        [Held("step", "ZeroFn 3 / FSDP2, ms/step"), Held("step", "ZeroFn 3 / DeepSpeed 3, ms/step")],
    )


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
    def row(name: str) -> list[Figure]:
        at = ("rounds", name)
        return [
            of("checkpoint", *at, "save"), of("checkpoint", *at, "load"), of("checkpoint", *at, "load_memory", unit=MB),
            Key("checkpoint", (*at, "blocked"), (*at, "memcpy")),
        ]  # fmt: skip

    yield "| fio, the same bytes | {:.2f} | {:.2f} | | | | |", row("fio")[:2]
    yield "| torch DCP | {:.2f} | {:.2f} | {:.0f} | {:.2f} | | nothing |", row("torch DCP")
    yield "| DeepSpeed 3 | {:.2f} | {:.2f} | {:.0f} | {:.2f} | |", row("DeepSpeed")
    yield (
        "| **ZeroFn 3** | **{:.2f}** | **{:.2f}** | **{:.0f}** | **{:.2f}** | **{:.2f}** | **nothing** |",
        [*row("ZeroFn"), of("checkpoint", "rounds", "ZeroFn", "in_flight")],
    )


def _of_meshes() -> Iterator[Piece]:
    for cut, ours, other, least in (
        ("tensor, 2", "tensor 2", "torch, tensor 2, loss_parallel", "torch, tensor 2, loss_parallel"),
        ("tensor, 4", "data 2 x tensor 2", "DeepSpeed AutoTP 2 x ZeRO-2", "torch, data 2 x tensor 2, loss_parallel"),
        ("context, 2", "context 2", "DeepSpeed Ulysses 2", "DeepSpeed Ulysses 2"),
        ("context, 4", "context 4", "DeepSpeed Ulysses 4", "DeepSpeed Ulysses 4"),
    ):
        yield (
            f"| {cut} | {ours} | {other} | {{:.2f}} | {{:.2f}} |",
            [Held("mesh", f"{cut} ranks: ms/step, ZeroFn, {ours} / {other}"),
             Held("mesh", f"{cut} ranks: memory, ZeroFn, {ours} / {least}")],
        )  # fmt: skip
    yield (
        "It takes {:.0f} ms and {:.1f} GB; plain torch with autocast and fused AdamW takes {:.0f} ms and {:.1f} GB.",
        [
            of("attention_gpu", name, *field, unit=unit)
            for name in ("zerofn", "torch")
            for field, unit in ((("ms",), 1.0), (("peak_bytes",), GB))
        ],
    )


def _of_foresight(data: Any) -> list[float]:
    """Predicted over measured seconds of each row, the median of its rounds."""
    rows = [x for model in data["rows"].values() for x in model.values()]
    return [median(a / b for a, b in zip(x["predicted"], x["measured"], strict=True)) for x in rows]


def _of_predictions() -> Iterator[Piece]:
    yield (
        "| time of a step | {:.2f} to {:.2f}, median {:.2f} |",
        [Made("foresight", lambda d, how=how: how(_of_foresight(d))) for how in (min, max, median)],
    )


def _of_chaos() -> Iterator[Piece]:
    def by_fault(data: Any) -> list[float]:
        found: dict[str, list[float]] = {}
        for x in data["faults"]:
            found.setdefault(x["fault"], []).append(x["seconds"])
        return [median(x) for x in found.values() if any(x)]  # of a pause nothing has to recover

    yield "After {:.0f} of these faults, the final state", [Made("chaos", lambda d: len(d["faults"]))]
    yield (
        "took between {:.0f} s (a full disk, a killed rank) and {:.0f} s (a frozen rank, with `ZEROFN_PATIENCE=10`); "
        "the longest recovery took {:.0f} s",
        [Made("chaos", lambda d: min(by_fault(d))), Made("chaos", lambda d: max(by_fault(d))),
         Made("chaos", lambda d: max(x["seconds"] for x in d["faults"]))],
    )  # fmt: skip
    yield "All {:,.0f} bit flips of", [of("flips", "flips")]


def _of_pipelines() -> Iterator[Piece]:
    def row(cell: str, name: str, *more: str) -> list[Figure]:
        at = ("cells", cell, "rows", name)
        units = {"ms": 1.0, "beyond": MB, "wire": MB}
        return [of("pipe", *at, field, unit=units[field]) for field in ("ms", "beyond", *more)]

    for words, name in (
        ("torch.distributed.pipelining | `1F1B`", "torch, 1F1B"), (" | `Interleaved1F1B`", "torch, interleaved"),
        (" | `ZBVZeroBubble`", "torch, ZBV"), (" | `1F1B`, compiled layers", "torch, 1F1B, compiled"),
        ("DeepSpeed's PipelineEngine | `1F1B`", "DeepSpeed, 1F1B"), ("ZeroFn | `1f1b`", "ZeroFn, 1f1b"),
        (" | `interleaved`", "ZeroFn, interleaved"), (" | `zbv`", "ZeroFn, zbv"), (" | `auto`", "ZeroFn, auto"),
        (' | `1f1b`, `backend="inductor"`', "ZeroFn, 1f1b, compiled"),
        (' | `auto`, `backend="inductor"`', "ZeroFn, auto, compiled"),
    ):  # fmt: skip
        yield f"|{words if words[0] == ' ' else f' {words}'} | {{:.0f}} | {{:.0f}} |\n", row("pipe 2", name)
    for words, name in (
        ("torch.distributed.pipelining x FSDP2 | `1F1B`", "torch, 1F1B"),
        (" | `Interleaved1F1B`", "torch, interleaved"),
        (" | `ZBVZeroBubble`", "torch, ZBV"),
        (" | `1F1B`, compiled layers", "torch, 1F1B, compiled"),
    ):
        cells = row("pipe 2 x data 2", f"{name} x FSDP2", "wire")
        yield f"|{words if words[0] == ' ' else f' {words}'} | {{:.0f}} | {{:.0f}} | {{:.0f}} |", cells
    for words, name in (
        ("ZeroFn, ZeRO stage 3 | `auto`", "auto x stage 3, units kept"),
        (' | `1f1b`, `backend="inductor"`', "1f1b x stage 3, units kept, compiled"),
        (' | `auto`, `backend="inductor"`', "auto x stage 3, units kept, compiled"),
    ):
        cells = row("pipe 2 x data 2", f"ZeroFn, {name}", "wire")
        yield f"|{words if words[0] == ' ' else f' {words}'} | {{:.0f}} | {{:.0f}} | {{:.0f}} |", cells
    makespans = lambda d: [  # noqa: E731
        median(a / b for a, b in zip(x["simulated"], x["executed"], strict=True)) for x in d["rows"].values()
    ]
    yield (
        "take {:.3f} to {:.3f} times as long in the simulation as in the measurement",
        [Made("pipe_foresight", lambda d: min(makespans(d))), Made("pipe_foresight", lambda d: max(makespans(d)))],
    )


def _of_wires() -> Iterator[Piece]:
    def row(name: str) -> list[Figure]:
        at = ("cells", "2", "rows")
        found: list[Figure] = [of("wire_network", *at, name, "100 Mbit/s", "sent", unit=MB)]
        for link in ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s"):
            found += [of("wire_network", *at, name, link, "ms")]
            found += [Key("wire_network", (*at, name, link, "ms"), (*at, "DDP", link, "ms"))]
        return found

    for words, name in (
        ("DDP", "DDP"), ("DDP, bf16 hook", "DDP, bf16 hook"), ("DDP, PowerSGD hook of rank 4", "DDP, PowerSGD 4"),
        ("FSDP2", "FSDP2"), ("stage 3", "ZeroFn 3"), ('stage 3, `wire="bf16"`', "ZeroFn 3, bf16"),
        ('stage 3, `wire="fp8"`', "ZeroFn 3, fp8"), ('stage 3, `wire="int8"`', "ZeroFn 3, int8"),
        ("stage 3, int4 for gathers, int8 for reductions", "ZeroFn 3, int4 / int8"),
        ('stage 1, `wire="int8"`', "ZeroFn 1, int8"),
        ("stage 0, `optim.onebit_adam` after its freeze step", "ZeroFn 0, 1-bit Adam"),
        ("`zerofn.diloco(every=10)`", "ZeroFn, DiLoCo 10"),
    ):  # fmt: skip
        yield f"| {words} | {{:.1f}} | {{:.0f}} | {{:.2f}} | {{:.0f}} | {{:.2f}} | {{:.0f}} | {{:.2f}} |", row(name)
    for words, name in (
        ('stage 3, `wire="fp8"`', "ZeroFn 3, fp8"), ('stage 3, `wire="int8"`', "ZeroFn 3, int8"),
        ("stage 3, int4 for gathers, int8 for reductions", "ZeroFn 3, int4 / int8"),
        ("`optim.onebit_adam`, signs from step 75 on", "ZeroFn 0, 1-bit Adam"),
        ("DDP with PowerSGD", "DDP, PowerSGD 4"), ("`zerofn.diloco(every=10, after=75)`", "ZeroFn, DiLoCo 10"),
    ):  # fmt: skip
        last = lambda d, name=name: mean(x["validation"][-1][1] for x in d["trained"][name])  # noqa: E731
        yield f"| {words} | {{:.3f}} | ", [Made("wire_quality", last)]


def _of_layouts() -> Iterator[Piece]:
    for words, name in (
        ("dense, torch | 100 %", "dense, torch"), ("`everything` | 100 %", "everything"),
        ("`causal` | 50.2 %", "causal"),
        ("<code>sliding_window(1024) &#124; sinks(4)</code> | 12.8 %", "window of 1 k, sinks"),
        ("documents of 1,024 tokens | 6.2 %", "documents of 1 k"),
        ("`deepspeed.bigbird(block=64)` | 4.6 %", "bigbird"),
        ("`deepspeed.bigbird(block=16)` | 1.4 %", "bigbird, blocks of 16"),
        ("16 blocks of 64, chosen by the step | 6.2 %", "16 blocks of 64, chosen"),
        ("the same blocks, gathered with torch | 6.2 %", "16 blocks of 64, gathered"),
    ):  # fmt: skip
        share = of("sparse", "rows", name, unit=1e-3)
        of_dense = Key("sparse", ("rows", name), ("rows", "dense, torch"))
        yield f"| {words} | {{:.0f}} | {{:.2f}} | {{:.0f}} |", [share, of_dense, of("sparse", "memory", name, unit=MB)]
    for length in ("4096", "16384", "65536"):
        digits = {"4096": 2, "16384": 1, "65536": 1}[length]
        at = [of("sparse_lengths", "planned", length, x, unit=1e12) for x in (
            "causal", "window of 1 k, sinks, causal", "documents of 1 k, causal")]  # fmt: skip
        first = 0 if length == "65536" else digits
        yield f"| {int(length):,} tokens | {{:.{first}f}} | {{:.{digits}f}} | {{:.{digits}f}} |", [*at]
    yield (
        "takes {:.2f} times as long as a step on the same documents",
        [Held("packed", "packed: a step's time of that of documents apart")],
    )


def _of_offload() -> Iterator[Piece]:
    host = lambda x: Held("offload", f"host, {x}: bytes per parameter")  # noqa: E731
    drives = lambda x: Held("offload", f"drives, exact, {x}: bytes per parameter")  # noqa: E731
    yield (
        "| float32 moments | {:.1f} | {:.1f} | {:.1f} |",
        [host("exact, no finite check"), host("precision='bf16', clipped and checked"),
         host("exact, clipped and checked")],
    )  # fmt: skip
    yield (
        "| 8-bit moments | {:.1f} | | {:.1f} |",
        [host("8-bit moments, no finite check"), host("8-bit moments, clipped and checked")],
    )
    yield "| everything on the drive | {:.1f} | | {:.1f} |", [drives("no finite check"), drives("clipped and checked")]


def _of_features() -> Iterator[Piece]:
    kinds = ("host, exact", "host, 8-bit moments", "drives, exact")
    yield (
        "in all, a parameter takes {:.1f} bytes with float32 moments, {:.1f} with 8-bit moments, and {:.1f} if its "
        "state is on drives",
        [Held("offload", f"{x}, no finite check: bytes per parameter") for x in kinds],
    )


def _of_readme() -> Iterator[Piece]:
    row = lambda x: [of("step", "rows", x, "ms"), of("step", "rows", x, "beyond", unit=MB)]  # noqa: E731
    yield (
        "ZeroFn at stage 3 takes {:.0f} ms per step and {:.0f} MB per rank, FSDP2 takes {:.0f} ms and {:.0f} MB, "
        "and DeepSpeed at stage 3 takes {:.0f} ms and {:.0f} MB",
        [*row("ZeroFn 3"), *row("FSDP2"), *row("DeepSpeed 3")],
    )


KEYS: dict[str, list[Piece]] = {
    "README.md": [*_of_readme()],
    "docs/performance.md": [
        *_of_step(), *_of_memory(), *_of_compiled(), *_of_predictions(), *_of_meshes(), *_of_frameworks(),
        *_of_checkpoints(),
    ],
    "docs/lasting.md": [*_of_chaos()],
    "docs/pipelines.md": [*_of_pipelines()],
    "docs/wire.md": [*_of_wires()],
    "docs/long_rows.md": [*_of_layouts()],
    "docs/offload.md": [*_of_offload()],
    "docs/features.md": [*_of_features()],
}  # fmt: skip


def main() -> None:
    """Write the figures into the pages."""
    for page, pieces in KEYS.items():
        path = ROOT / page
        path.write_text(filled(path.read_text(), pieces))


if __name__ == "__main__":
    main()
