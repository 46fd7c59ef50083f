"""How fast this machine updates state in host memory, and the share of the updates that the host should do.

[Note: shares] Let f be the share that the host updates, b its bytes of host memory per element there, and s the bytes
of state per element that are streamed each way otherwise. An element takes

    T(f) = max(f b / DRAM, (2 f + (1 - f) s) / link, (f (b + 4) + (1 - f) 2 s) / DRAM)

seconds: the host's arithmetic, the link in one direction (gradients down and parameters up, or state), and the host's
memory, which both use. If host memory is less than about twice as fast as the link, the device alone is fastest.
"""

from __future__ import annotations

import functools
import time

import torch

from ..dry_run.fake_machine import fake_machine
from ..memory.pinned import aligned
from ..ops import adamw, cpu  # noqa: F401 - declares the rule

ELEMENTS = 1 << 22  # elements to time: 64 MiB of state, more than caches hold


def seconds(share: float, on_host: float, streamed: float, dram: float, link: float) -> float:
    """Return T(f) of [Note: shares], in seconds per element, from bytes per element and bytes per second."""
    return max(
        share * on_host / dram,
        (2 * share + (1 - share) * streamed) / link,
        (share * (on_host + 4) + (1 - share) * 2 * streamed) / dram,
    )


def best_share(on_host: float, streamed: float, dram: float, link: float) -> float:
    """Return the host's share with the least T, in hundredths; of equal ones the smallest."""
    return min((k / 100 for k in range(101)), key=lambda f: seconds(f, on_host, streamed, dram, link))


@functools.cache
def dram_rate() -> float:
    """Return bytes per second of an AdamW update on the host with all threads."""
    p, g, m, v = (torch.zeros(ELEMENTS) for _ in range(4))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        cpu.update_(
            "adamw",
            [p],
            g,
            [[m], [v]],
            starts=[0],
            stops=[ELEMENTS],
            rates=[0.0],
            decays=[0.0],
            hyper={"b1": 0.9, "b2": 0.999, "eps": 1e-8},
            count=1,
        )
        best = min(best, time.perf_counter() - start)
    return 28 * ELEMENTS / best


@functools.cache
def link_rate(device: torch.device) -> float:
    """Return bytes per second from page-locked host memory to a CUDA device."""
    there = torch.empty(ELEMENTS, device=device)
    host = aligned(there.nbytes)[: there.nbytes].view(there.dtype)
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return host.nbytes / best


def share_of(update: str, device: torch.device, on_host: float, streamed: float) -> float:
    """Return the share of units that the host updates, for an `Offload.update`.

    "cpu" is all, "gpu" none, "split" the best share by this machine's rates. "auto" takes whichever of these is
    faster than the others by more than a twentieth.
    """
    machine = fake_machine()
    if update in ("cpu", "gpu") or machine is None and device.type != "cuda":
        return float(update != "gpu")
    dram, link = (dram_rate(), link_rate(device)) if machine is None else (machine.dram, machine.link)
    rates = (on_host, streamed, dram, link)
    best = best_share(*rates)
    if update == "split":
        return best
    simple = min((0.0, 1.0), key=lambda f: seconds(f, *rates))
    return simple if seconds(simple, *rates) <= 1.05 * seconds(best, *rates) else best
