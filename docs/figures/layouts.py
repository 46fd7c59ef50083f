"""long_rows.md: attention by layouts."""

from __future__ import annotations

from collections.abc import Iterator

from docs.results import MB, Held, Key, Piece, Worked, of

LENGTH = 16384
SHARE = 1.3  # of benchmarks.sparse.sparse: a layout may take so many times its share of dense attention's time


def of_layouts() -> Iterator[Piece]:
    """Yield the pieces of long_rows.md."""
    for words, name in (
        ("dense, torch", "dense, torch"), ("`everything`", "everything"),
        ("`causal`", "causal"),
        ("<code>sliding_window(1024) &#124; sinks(4)</code>", "window of 1 k, sinks"),
        ("documents of 1,024 tokens", "documents of 1 k"),
        ("`deepspeed.bigbird(block=64)`", "bigbird"),
        ("`deepspeed.bigbird(block=16)`", "bigbird, blocks of 16"),
        ("16 blocks of 64, chosen by the step", "16 blocks of 64, chosen"),
        ("the same blocks, gathered with torch", "16 blocks of 64, gathered"),
    ):  # fmt: skip
        share = of("sparse", "rows", name, unit=1e-3)
        of_dense = Key("sparse", ("rows", name), ("rows", "dense, torch"))
        pairs = Worked(lambda name=name: 100 * _share_of(name))
        digits = 0 if name in ("dense, torch", "everything") else 1
        yield (
            f"| {words} | {{:.{digits}f}} % | {{:.0f}} | {{:.2f}} | {{:.0f}} |",
            [pairs, share, of_dense, of("sparse", "memory", name, unit=MB)],
        )
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
    yield (
        "its forward pass of the window takes {:,.0f} ms",
        [of("sparse_lengths", "lengths", str(LENGTH), "rows", "window, FlexAttention, forward", unit=1e-3)],
    )


def _share_of(name: str) -> float:
    """Return the part of all pairs of tokens that a row of the benchmark computes, of which its limit is made."""
    if name in ("dense, torch", "everything"):
        return 1.0
    as_many = {"16 blocks of 64, gathered": "16 blocks of 64, chosen"}
    return Held("sparse", f"{as_many.get(name, name)}: time of dense attention's", "limit").value / SHARE


def of_rings() -> Iterator[Piece]:
    """Yield the pieces of "Along context"."""
    for words, name, sent, peak in (
        ("| `sliding_window(256)` | in order", "window of 256", 2, 1),
        ("| `everything` | early and late", "everything", 1, 1),
        ("without a fused kernel | early and late", "no layout", 1, 0),
    ):
        yield (
            f"{words} | {{:.{sent}f}} MB | {{:.{peak}f}} MB |",
            [of("sparse_ring", "rows", name, field, unit=MB) for field in ("sent", "peak")],
        )
