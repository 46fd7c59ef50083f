"""performance.md: meshes beside other libraries, and beside plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.results import GB, Figure, Held, Key, Made, Piece, of


def of_meshes() -> Iterator[Piece]:
    """Yield the pieces of "On meshes"."""
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
    for words, what in (
        ("take {:.3f} times as much memory on `context=2`", "llama, context 2, stage 3"),
        ("and {:.3f} times as much on `context=4`", "llama, context 4, stage 3"),
    ):
        yield words, [of("mesh_foresight", "rows", what, "activations")]
    yield (
        "counted {:.3f} to {:.3f} times as many bytes",
        [Made("mesh_foresight", lambda d, how=how: how(map(_on_wire, d["rows"].values()))) for how in (min, max)],
    )
    cells = (("tensor, 2 ranks", "tensor 2"), ("tensor, 4 ranks", "data 2 x tensor 2"))
    yield (
        "ZeroFn uses {:.2f} times as much memory on `tensor 2`, and {:.2f} times as much on `data 2",
        [_in_parts(*cell, "beyond") for cell in cells],
    )
    yield (
        "It takes {:.2f} times as long on `tensor 2`, and {:.2f} times on `data 2",
        [_in_parts(*cell, "ms") for cell in cells],
    )


def of_planned() -> Iterator[Piece]:
    """Yield the pieces of "Planned only, not run"."""
    for words, label, mark in (
        ("**data 8, stage 1**", "data=8, stage 1, bf16", "**"),
        ("data 4 x tensor 2, stage 1", "data=4,tensor=2, stage 1, bf16", "~ "),
        ("data 2 x tensor 4, stage 1", "data=2,tensor=4, stage 1, bf16", "~ "),
        ("tensor 8, stage 3", "tensor=8, stage 3, bf16", "~ "),
    ):
        yield planned(words, "8B", label, ("{:.1f} GB", "{:.0f} ms", "{:,.0f}"), mark)
    at = ("plans", "8B, whole tokens", "rows", "tensor=8, stage 3, bf16")
    yield (
        "the last row takes {:.0f} ms and {:.1f} GB",
        [of("mesh_plans", *at, "seconds", unit=1e-3), of("mesh_plans", *at, "device", unit=GB)],
    )
    for words, label, mark, seconds in (
        ("**replicate 8 x data 4 x tensor 2, stage 3, `hpz`** | **auto**",
         "replicate=8,data=4,tensor=2, stage 3, hpz, bf16, auto", "**", "{:.2f} s"),
        ("replicate 8 x data 8, stage 3, `hpz` | full", "replicate=8,data=8, stage 3, hpz, bf16, full", "", "{:.2f} s"),
        ("data 8 x tensor 8, stage 1 |", "data=8,tensor=8, stage 1, bf16", "~ ", "{:.2f} s"),
        ("data 64, stage 3 | full", "data=64, stage 3, bf16, full", "~ ", "{:.1f} s"),
    ):  # fmt: skip
        yield planned(words, "70B", label, ("{:.1f} GB", seconds, "{:,.0f}"), mark)


def planned(words: str, case: str, label: str, forms: tuple[str, ...], mark: str = "") -> Piece:
    """Return a row of a table of plans: memory (if it is shown), a step, tokens a second.

    `mark`: "**" for the best row, "~ " for an estimate.
    """
    at = ("plans", case, "rows", label)
    cells = [
        of("mesh_plans", *at, "device", unit=GB),
        of("mesh_plans", *at, "seconds", unit=1e-3 if any("ms" in x for x in forms) else 1.0),
        of("mesh_plans", *at, "speed"),
    ]
    row = " | ".join(mark + x + mark.strip("~ ") for x in forms)
    return f"| {words} | {row} |", cells[-len(forms) :]


def _on_wire(row: Any) -> float:
    """Return the loopback's bytes over those that ranks say they send."""
    return row["ranks"][0]["wire"] / sum(sum(x["sent"].values()) for x in row["ranks"])


def _in_parts(cell: str, name: str, field: str) -> Figure:
    """Return what sequence parallelism takes of the same mesh without it."""
    at = ("cells", cell, f"ZeroFn, {name}")
    return Key("mesh", (*at[:2], f"{at[2]}, in parts", field), (*at, field))
