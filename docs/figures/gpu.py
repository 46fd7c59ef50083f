"""performance.md: one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.results import GB, Figure, Held, Made, Piece, of

GiB = 1 << 30


def of_gpu() -> Iterator[Piece]:
    """Yield the pieces of "On a GPU"."""
    yield "within {:.1f} % of the planned peak", [Made("nccl", lambda d: 100 * (max(_ratios(d["nccl"])) - 1))]
    yield (
        "it is {:.1f} to {:.1f} % above",
        [Made("gpu", lambda d, how=how: 100 * (how(_beyond_plans(d)) - 1)) for how in (min, max)],
    )
    yield "trains in batches of {:.0f} pairs of sentences in 24 GiB", [_largest("large_offload", "batch")]
    yield "trains in batches of {:.0f} pairs in 24 GiB", [_largest("big_24", "batch")]
    yield "with {:.0f} GiB of host memory; the published", [_largest("big_24", "host_bytes", GiB)]
    yield (
        "T5-large takes {:.2f} times as long as the reference, in {:.2f} times the memory; for 64 pairs, {:.2f} times",
        [_beside(128), _beside(128, "used_bytes"), _beside(64)],
    )
    yield (
        "it took {:.2f} times as long in one run and {:.2f} times in another",
        [Made("gpu_earlier", lambda d: _of_batch(d, 16)["ratio"]), _beside(16)],
    )
    yield (
        "takes {:.2f} times as long as torch's fused AdamW",
        [Held("gpu", "AdamW in fp32, ours / torch fused, seconds")],
    )
    for words, moments in (
        ("reaches {:.2f} times the memory bandwidth of a plain copy", "fp32 master, fp32 moments"),
        ("reaches {:.2f} times this bandwidth with fp32 moments", "split master, fp32 moments"),
        ("{:.2f} times with bf16 moments", "split master, bf16 moments"),
        ("{:.2f} times with 8-bit moments", "split master, 8bit moments"),
    ):
        what = f"AdamW, {moments}: bandwidth, copy / ours"
        yield words, [Made("gpu", lambda d, what=what: 1 / _measured(d, what))]
    yield (
        "It takes {:.0f} ms and {:.1f} GB; plain torch with autocast and fused AdamW takes {:.0f} ms and {:.1f} GB.",
        [
            of("attention_gpu", name, *field, unit=unit)
            for name in ("zerofn", "torch")
            for field, unit in ((("ms",), 1.0), (("peak_bytes",), GB))
        ],
    )
    yield (
        "batches of {:,.0f} tokens or more; at {:,.0f} tokens the step took {:.2f} times as long",
        [Made("gpu", lambda d, row=row, field=field: d["parts"]["tokens"]["rows"][row][field])
         for row, field in ((0, "tokens"), (1, "tokens"), (1, "ratio"))],
    )  # fmt: skip


def _ratios(rows: list[dict[str, Any]]) -> list[float]:
    """Measured peaks over planned ones."""
    return [x["ratio"] for x in rows if "ratio" in x]


def _beyond_plans(data: Any) -> list[float]:
    """Measured peaks of large batches over planned ones."""
    rows = [x for part in ("large_offload", "big_24", "large_resident") for x in data["parts"][part]["rows"]]
    return [x["used_bytes"] / x["planned_bytes"] for x in rows if "used_bytes" in x]


def _largest(part: str, field: str, unit: float = 1.0) -> Figure:
    return Made("gpu", lambda d: max(x[field] for x in d["parts"][part]["rows"]) / unit)


def _of_batch(data: Any, batch: int) -> dict[str, Any]:
    return next(x for x in data["parts"]["plain"]["rows"] if x["batch"] == batch)


def _beside(batch: int, field: str = "seconds") -> Figure:
    """Return what we take of plain torch's seconds (the median of rounds' ratios) or bytes."""

    def make(data: Any) -> float:
        row = _of_batch(data, batch)
        return float(row["ratio"]) if field == "seconds" else row[field]["ours"] / row[field]["plain"]

    return Made("gpu", make)


def _measured(data: Any, what: str) -> float:
    return next(float(x["measured"]) for x in data["must_hold"] if x["what"] == what)
