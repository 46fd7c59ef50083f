"""plans.md and fast.md: what was planned, and what a process takes beside its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.figures.meshes import planned
from docs.figures.wires import element_bytes
from docs.results import GB, MB, Figure, Key, Made, Piece, Worked, of


def of_plans() -> Iterator[Piece]:
    """Yield the pieces of plans.md."""
    yield "a model's library: {:.1f} GB with transformers", [_of_host("imports", "process")]
    yield (
        "the graph of the captured step: {:.1f} GB for 48 layers",
        [Made("host", lambda d: (_moment(d, "plan")["process"] - _moment(d, "skeleton")["process"]) / GB)],
    )
    yield (
        "the plan says {:.1f} GB at the peak. The process itself took {:.1f} GB, and Linux reported a peak of "
        "{:.1f} GB",
        [_of_host("step 5", "planned"), _of_host("plan", "process"), _of_host("step 5", "peak")],
    )
    for tokens in (4096, 8192):
        for words, name in (("whole", "whole"), ("in tiles", "tiles")):
            at = ("rows", f"{tokens} tokens, {name}")
            yield (
                f"| {tokens:,} | {words} | {{:,.0f}} MB | {{:,.0f}} MB | {{:.1f}} s |",
                [of("logits", *at, "planned", unit=MB), of("logits", *at, "measured", unit=MB),
                 of("logits", *at, "seconds")],
            )  # fmt: skip
    forms = ("{:.2f} s", "{:,.0f}")
    yield planned("`data=8`", "4 layers", "data=8, stage 3, bf16", forms)
    yield planned("`pipe=2,data=4`", "4 layers in stages", "pipe=2,data=4, stage 3, bf16", forms)
    one = 128_256 * 8192 * 4 / GB  # float32
    yield "128,256 and 8,192 tokens make {:.1f} GB of logits", [Worked(lambda: one)]
    yield "the three tensors take {:.1f} GB", [Worked(lambda: 3 * one / 16)]


def _moment(data: Any, moment: str) -> dict[str, Any]:
    """Return what a run of t5-3b with 8-bit moments had then."""
    return next(x for x in data["8-bit moments"]["moments"] if x["moment"] == moment)


def _of_host(moment: str, field: str) -> Figure:
    return Made("host", lambda d: _moment(d, moment)[field] / GB)


def of_fast() -> Iterator[Piece]:
    """Yield the pieces of fast.md."""
    yield (
        "(by more than {:.1f} % and {:.0f} KiB)",
        [Worked(lambda: 100 * _more()[0]), Worked(lambda: _more()[1] / 1024)],
    )
    at = [("plans", "float8", "rows", f"data=1, stage 0, {x}", "seconds") for x in ("fp8", "bf16")]
    yield "the planned time of a step in float8 is {:.2f} times that of", [Key("mesh_plans", *at)]
    yield "These scales add {:.1f} % to the bytes", [Worked(lambda: 100 * (element_bytes("fp8") - 1))]


def _more() -> tuple[float, int]:
    """Return by which part of what is planned, and by how many bytes, a compiled region may exceed it."""
    from zerofn.lowering import regions

    return regions.MORE, regions.LEAST
