"""All ranks of a job meet in its store, and take keys that no earlier attempt of the job has used.

A launcher that starts a failed job again (torchrun --max-restarts, or its elastic agent when machines come and go) may
keep its store. In it are the addresses of processes that have ended, and what they have said.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time

import torch.distributed as dist

log = logging.getLogger("zerofn")

PATIENCE = 300.0  # seconds until ranks that have not come are an error: they may import from a slow drive
FIRST_WORD, NEXT_WORD = 10.0, 30.0  # seconds until a waiting rank says for whom, and says it again
_PAUSE = 0.01
_TRY = 5.0  # seconds of one try to connect


def store_at(address: tuple[str, int], rank: int, *, held_for_us: bool) -> dist.Store:
    """Return the job's store. Rank 0 listens at `address`, unless the launcher does (`held_for_us`).

    torch's own rendezvous would wait in silence until every rank has come. Here the others connect when they come, and
    a rank that waits says for whom. Raises `RuntimeError` if nobody listens within `PATIENCE` seconds.
    """
    host, port = address
    if rank == 0 and not held_for_us:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    waiting, whom = _Waiting(), "the launcher's agent" if held_for_us else "rank 0"
    while True:
        try:
            socket.create_connection(address, _TRY).close()  # torch's client logs a stack for each try that fails
            return dist.TCPStore(host, port, is_master=False)
        except OSError:
            waiting.pause(f"{whom}, which is to listen at {host}:{port},")


def fresh(store: dist.Store, rank: int, size: int) -> dist.Store:
    """Return a part of `store` that is new, the same on all ranks of this attempt, once all of them have come.

    Rank 0 names it. It tells the name to every process that has said that it is here; others are of attempts before.
    Raises `RuntimeError` that names the ranks that have not come within `PATIENCE` seconds.
    """
    own = secrets.token_hex(8)
    name = _welcome(store, size, own) if rank == 0 else _arrive(store, rank, own)
    return dist.PrefixStore(f"zerofn/{name}", store)


def _arrive(store: dist.Store, rank: int, own: str) -> str:
    store.set(_here(rank), own)
    waiting = _Waiting()
    while True:
        if store.check([_answer(rank)]):
            to, _, name = store.get(_answer(rank)).decode().partition(" ")
            if to == own:
                store.set(_came(name, rank), "")
                return name
        waiting.pause("rank 0")


def _welcome(store: dist.Store, size: int, name: str) -> str:
    answered: dict[int, str] = {}
    missing = list(range(1, size))
    waiting = _Waiting()
    while missing:
        for rank in missing:
            if store.check([_here(rank)]):
                arrived = store.get(_here(rank)).decode()
                if answered.get(rank) != arrived:  # the first may be of a process that has ended
                    store.set(_answer(rank), f"{arrived} {name}")
                    answered[rank] = arrived
        missing = [rank for rank in missing if not store.check([_came(name, rank)])]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            waiting.pause(f"rank {', '.join(map(str, missing[:8]))}{more}")
    return name


def _here(rank: int) -> str:
    return f"zerofn/here/{rank}"


def _answer(rank: int) -> str:
    return f"zerofn/answer/{rank}"


def _came(name: str, rank: int) -> str:
    return f"zerofn/{name}/came/{rank}"


class _Waiting:
    """Says now and then for whom this process waits."""

    def __init__(self) -> None:
        self._start, self._word = time.monotonic(), FIRST_WORD

    def pause(self, who: str) -> None:
        """Wait a moment for `who`."""
        waited = time.monotonic() - self._start
        if waited > PATIENCE:
            raise RuntimeError(
                f"{who} did not start within {PATIENCE:g} s of the job's start. See its output. Every rank must be "
                "started with the same address and number of ranks."
            )
        if waited > self._word:
            log.warning("waited %.0f s for %s to start.", waited, who)
            self._word = waited + NEXT_WORD
        time.sleep(_PAUSE)
