"""wire.md: codecs, what they send, and what they do to a step and to the loss."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median
from typing import Any

from docs.results import MB, Figure, Key, Made, Piece, Worked, of

TRAINED = (  # as wire.md and wire_quality.json name them
    ('stage 3, `wire="fp8"`', "ZeroFn 3, fp8"),
    ('stage 3, `wire="int8"`', "ZeroFn 3, int8"),
    ("stage 3, int4 for gathers, int8 for reductions", "ZeroFn 3, int4 / int8"),
    ("stage 0, `optim.onebit_adam`, signs from step 75 on", "ZeroFn 0, 1-bit Adam"),
    ('stage 1, `wire="int8"`, `optim.onebit_adam`, signs from step 75 on', "ZeroFn 1, int8, 1-bit Adam"),
    ("DDP with PowerSGD", "DDP, PowerSGD 4"),
    ("`zerofn.diloco(every=10, after=75)`", "ZeroFn, DiLoCo 10"),
)


def of_wires() -> Iterator[Piece]:
    """Yield the pieces of wire.md."""
    yield from _of_links()
    yield from _of_four()
    yield from _of_steps()
    yield from _of_codecs()
    yield from _of_minutes()


def _of_links() -> Iterator[Piece]:
    """Yield the table of all rows on all links."""
    at = ("cells", "2", "rows")

    def row(name: str) -> list[Figure]:
        found: list[Figure] = [_sent(name)]
        for link in ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s"):
            found += [of("wire_network", *at, name, link, "ms"), _of_plain("2", name, link)]
        return found

    for words, name in (
        ("DDP", "DDP"), ("DDP, bf16 hook", "DDP, bf16 hook"), ("DDP, PowerSGD hook of rank 4", "DDP, PowerSGD 4"),
        ("FSDP2", "FSDP2"), ("stage 3", "ZeroFn 3"), ('stage 3, `wire="bf16"`', "ZeroFn 3, bf16"),
        ('stage 3, `wire="fp8"`', "ZeroFn 3, fp8"), ('stage 3, `wire="int8"`', "ZeroFn 3, int8"),
        ("stage 3, int4 for gathers, int8 for reductions", "ZeroFn 3, int4 / int8"),
        ('stage 1, `wire="int8"`', "ZeroFn 1, int8"),
        ("stage 0, `optim.onebit_adam` after its freeze step", "ZeroFn 0, 1-bit Adam"),
        ("`zerofn.diloco(every=10)`", "ZeroFn, DiLoCo 10"), ("`zerofn.diloco(every=50)`", "ZeroFn, DiLoCo 50"),
    ):  # fmt: skip
        yield f"| {words} | {{:.1f}} |{' {:.0f} ({:.2f}) |' * 3}", row(name)


def _of_four() -> Iterator[Piece]:
    """Yield the sentence on four ranks."""
    slow = ("FSDP2", "ZeroFn 3", "ZeroFn 3, int8", "ZeroFn 0, 1-bit Adam", "ZeroFn, DiLoCo 10")
    yield (
        'FSDP2 {:.2f}, stage 3 {:.2f}, with `wire="int8"` {:.2f}, `optim.onebit_adam` {:.2f}, '
        "`zerofn.diloco(every=10)` {:.2f}.",
        [_of_plain("4", name, "100 Mbit/s") for name in slow],
    )
    yield (
        'At 10 Gbit/s, `wire="int8"` takes {:.2f} and `optim.onebit_adam` {:.2f}.',
        [_of_plain("4", name, "10 Gbit/s") for name in slow[2:4]],
    )


def _of_plain(world: str, name: str, link: str) -> Figure:
    """Return a row's time over DDP's in the same rounds; DiLoCo's, of few rounds, over DDP's median."""
    rows = ("cells", world, "rows")
    if "DiLoCo" in name:
        times = [of("wire_network", *rows, x, link, "ms") for x in (name, "DDP")]
        return Worked(lambda: times[0].value / times[1].value)
    return Key("wire_network", (*rows, name, link, "ms"), (*rows, name, link, "plain_ms"))


def _of_steps() -> Iterator[Piece]:
    """Yield what a step takes on each link, in the order in which one chooses a codec, and what ranks send."""
    names = ("ZeroFn 3", "ZeroFn 3, bf16", "ZeroFn 3, int8", "ZeroFn 3, int4 / int8")
    for link in ("10 Gbit/s", "1 Gbit/s", "100 Mbit/s"):
        row = [of("wire_network", "cells", "2", "rows", name, link, "ms") for name in names]
        yield f"| {link} | {{:.0f}} ms | {{:.0f}} ms | {{:.0f}} ms | {{:.0f}} ms |", [*row]
    yield ("once: {:.1f} MB in int8, where stage 3 sends {:.1f} MB", [_sent("ZeroFn 1, int8"), _sent("ZeroFn 3, int8")])
    yield ("#1-bit-optimizers) {:.1f} MB per step", [_sent("ZeroFn 0, 1-bit Adam")])
    yield (
        "#replicas-that-train-apart-diloco) {:.1f} to {:.1f} MB",
        [_sent("ZeroFn, DiLoCo 50"), _sent("ZeroFn, DiLoCo 10")],
    )
    yield "the interfaces count {:.1f} % more", [Made("wire_network", lambda d: 100 * (median(_headers(d)) - 1))]


def _sent(row: str) -> Figure:
    return of("wire_network", "cells", "2", "rows", row, "100 Mbit/s", "sent", unit=MB)


def _headers(data: Any) -> list[float]:
    """Return the interfaces' bytes over the transport's, of each step."""
    links = (x for row in data["cells"]["2"]["rows"].values() for x in row.values())
    return [x["sent"] / x["counted"] for rounds in links for x in rounds if x["counted"]]


def _of_codecs() -> Iterator[Piece]:
    for form, words in (
        ("bf16", "float32 rounded"), ("fp8", "float8 e4m3"), ("int8", "integers from -127"),
        ("int4", "integers from -7"),
    ):  # fmt: skip
        shown = "{:.0f}" if form == "bf16" else "{:.3f}"
        yield f"| `{form}` | {shown} | {words}", [Worked(lambda form=form: element_bytes(form))]


def element_bytes(form: str) -> float:
    """Return the bytes of an element on the wire, with its part of the block's scale.

    >>> element_bytes("int8") == 1 + 2 / 256
    True
    """
    from zerofn.comm.wire import row_bytes

    num = 1024  # blocks
    codec = form if form == "bf16" else f"{form}.256:0-{num}"
    return row_bytes(256 * num, 4, codec) / (256 * num)


def _of_minutes() -> Iterator[Piece]:
    loss = Made("wire_quality", lambda d: _curves().reached_by_all(d))
    yield "reaches {:.3f}, the highest", [loss]
    yield "minutes to {:.3f} |", [loss]
    yield "| DDP | {:.3f} | {:.2f} |\n", [_loss("ZeroFn 3"), _minutes("DDP")]  # bit-identical losses
    for words, name in (("stage 3", "ZeroFn 3"), *TRAINED):
        yield f"| {words} | {{:.3f}} | {{:.2f}} |\n", [_loss(name), _minutes(name)]
    yield (
        "int8 is at {:.2f} in {:.2f} minutes, int8 and then 1-bit Adam in {:.2f}, DDP with PowerSGD in {:.1f}, 1-bit "
        "Adam alone in {:.1f}, DiLoCo in {:.1f}, DDP in {:.1f}",
        [
            loss,
            *map(_minutes, ("ZeroFn 3, int8", "ZeroFn 1, int8, 1-bit Adam", "DDP, PowerSGD 4", "ZeroFn 0, 1-bit Adam")),
            *map(_minutes, ("ZeroFn, DiLoCo 10", "DDP")),
        ],
    )


def _curves() -> Any:
    from benchmarks.wire import curves

    return curves


def _loss(name: str) -> Figure:
    return Made("wire_quality", lambda d: mean(x["validation"][-1][1] for x in d["trained"][name]))


def _minutes(name: str) -> Figure:
    """Return the minutes at 100 Mbit/s after which a row has the loss that all rows reach."""

    def make(data: Any) -> float:
        curves = _curves()
        return float(curves.minutes_to(curves.over_time(data, name), curves.reached_by_all(data)))

    return Made("wire_quality", make)
