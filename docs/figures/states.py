"""offload.md, features.md and lasting.md: where a state is, and what it survives."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from docs.figures.beside import off_plans
from docs.results import Held, Made, Piece, of


def of_offload() -> Iterator[Piece]:
    """Yield the pieces of offload.md."""
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
    for machine, file in (("Intel Xeon", "nvme"), ("a second Intel Xeon", "nvme_xeon"), ("AMD EPYC", "nvme_epyc")):
        yield (
            f"| {machine} | {{:.2f}} to {{:.2f}} |",
            [Made(file, lambda d, how=how: how(_of_fio(d))) for how in (min, max)],
        )


def _of_fio(data: Any) -> list[float]:
    """Return the time of each kind of steps over fio's for the same bytes."""
    return [x["measured"] for x in data["must_hold"] if x["what"].startswith("steps with ")]


def of_features() -> Iterator[Piece]:
    """Yield the pieces of features.md."""
    kinds = ("host, exact", "host, 8-bit moments", "drives, exact")
    yield (
        "in total, a parameter takes {:.1f} bytes with float32 moments, {:.1f} with 8-bit moments, and {:.1f} if its "
        "state is on drives",
        [Held("offload", f"{x}, no finite check: bytes per parameter") for x in kinds],
    )
    yield "the peak was predicted within {:.1f} %", [off_plans()]


def of_chaos() -> Iterator[Piece]:
    """Yield the pieces of lasting.md."""

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
