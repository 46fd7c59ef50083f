"""pipelines.md and glossary.md: schedules, pipelines beside other libraries, and planned."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from docs.results import GB, MB, Figure, Made, Piece, Worked, of


def of_pipelines() -> Iterator[Piece]:
    """Yield the pieces of pipelines.md."""
    yield from _of_schedules()
    yield from _beside_others()
    yield from _of_plans()


def _beside_others() -> Iterator[Piece]:
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


def _simulated(name: str, microbatches: int) -> Any:
    """Return a run of a schedule on 4 ranks with equal stages, F = I = W, and transfers of a twentieth of F."""
    from zerofn import schedules

    schedule = schedules.make(name, ranks=4, microbatches=microbatches)
    one = 1 / schedule.chunks
    return schedules.simulate(schedule, schedules.Costs.even(schedule.num_stages, one, one, one, 0.05))


def _idle(name: str, microbatches: int) -> Figure:
    return Worked(lambda: max(_simulated(name, microbatches).idle))


def _of_schedules() -> Iterator[Piece]:
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved", "interleaved-zb", "zbv"):
        placed = "a line" if name in ("gpipe", "1f1b", "zb-h1") else f"a {'V' if name == 'zbv' else 'loop'}, two a rank"
        idle: list[Figure] = [_idle(name, m) for m in (8, 16, 32)]
        held = Worked(lambda name=name: max(_simulated(name, 32).in_flight))
        last = {"gpipe": "m", "interleaved": "{:.1f}"}.get(name, "{:.0f}")
        yield (
            f"| `{name}` | {placed} | {{:.2f}} | {{:.2f}} | {{:.2f}} | {last} |",
            idle if last == "m" else [*idle, held],
        )


def _of_plans() -> Iterator[Piece]:
    def row(model: int, kind: str, *fields: str) -> list[Figure]:
        def take(data: Any, field: str) -> float:
            return float(data["plans"][model][kind][0][field])

        return [Made("pipe_plans", lambda d, field=field: take(d, field)) for field in fields]

    def held(model: int, rank: int) -> Figure:
        return Made("pipe_plans", lambda d: d["plans"][model]["staged"][0]["stages"][rank]["device"] / GB)

    def whole(model: int) -> Figure:
        return Made("pipe_plans", lambda d: d["plans"][model]["unstaged"][0]["device"] / GB)

    spent = ("seconds", "computing", "idle", "waits")
    for model, staged, unstaged in (
        (0, "`pipe=8,data=8`", "`data=8,tensor=8`"), (1, "`pipe=8,data=8,tensor=8`", "`data=64,tensor=8`"),
    ):  # fmt: skip
        yield (
            f"{staged}, all recomputed | {{:.1f}} | {{:.1f}} | {{:.1f}} | {{:.1f}} | {{:.1f}} on the first stage, "
            "{:.1f} on the last |",
            [*row(model, "staged", *spent), held(model, 0), held(model, -1)],
        )
        yield (
            f"{unstaged}, nothing recomputed | {{:.1f}} | {{:.1f}} | - | {{:.1f}} | {{:.1f}} |",
            [*row(model, "unstaged", "seconds", "computing", "waits"), whole(model)],
        )
    yield (
        "confirmed this in all {:.0f} cases",
        [Made("pipe_equality", lambda d: len(d["must_hold"]) - len(d["one process"]))],
    )


def of_glossary() -> Iterator[Piece]:
    """Yield the pieces of glossary.md."""
    yield "{:.2f} of a step for `1f1b` with 4 ranks and 8 microbatches", [_idle("1f1b", 8)]
