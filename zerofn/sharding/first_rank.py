"""What ranks bring to `shard`, and what counts where it differs: the first rank's draws and values. An initialisation
that computes something else on another rank is refused.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..comm.mesh import Mesh
from ..job.agreement import exchange, fingerprint, rank_and_size
from ..ops.same import checksum
from ..util.patches import Patches
from .transfers import equalize

log = logging.getLogger("zerofn")

FUNCTION, VALUES = "zerofn.shard of a function", "zerofn.shard of a state"
_NAMED = 3  # leaves and ranks in a warning


class Generator(NamedTuple):
    """A global random generator, whose state is read and set as a text."""

    name: str
    state: Callable[[], str]
    restore: Callable[[str], object]


def on_host() -> list[Generator]:
    """Return the generators that a function draws from on the host."""
    return [
        Generator("torch's", lambda: _text(torch.get_rng_state()), lambda text: torch.set_rng_state(_state(text))),
        Generator("Python's random", lambda: json.dumps(random.getstate()), _restore_pythons),
        Generator("numpy.random", _numpys, lambda text: np.random.set_state(json.loads(text))),
    ]


def on_device() -> list[Generator]:
    """Return the generator of this rank's CUDA device, if the rank has used one."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    state, restore = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    return [Generator("torch.cuda's", lambda: _text(state()), lambda text: restore(_state(text)))]


@contextlib.contextmanager
def as_on_first(mesh: Mesh, generators: Sequence[Generator]) -> Iterator[None]:
    """Inside, the generators are in the states that they have on the mesh's first rank. All ranks must call it.

    Afterwards a generator that was in another state is in that state again. The others continue where the code inside
    has left them, as in one process; so does one that the code has seeded, which is where it would be anyhow. Logs, on
    the first rank, if the code drew from one that differs between ranks.
    """
    first, own = _first(mesh), {x.name: x.state() for x in generators}
    mine = json.dumps([first, {name: fingerprint(state) for name, state in own.items()}])
    told: list[tuple[int, dict[str, str]]] = [json.loads(text) for text in exchange(FUNCTION, mine)]
    states: dict[str, str] = {}
    if any(prints != told[f][1] for f, prints in told):
        states = json.loads(exchange(FUNCTION, json.dumps(own if _is(first) else {}))[first])
    replaced = [x for x in generators if states.get(x.name, own[x.name]) != own[x.name]]
    for x in replaced:
        x.restore(states[x.name])
    seeded: set[str] = set()
    try:
        with _seeds_noted(seeded):
            yield
        replaced = [x for x in replaced if x.name not in seeded]
        if _is(first):
            drawn_from = [x.name for x in generators if x.state() != own[x.name] and x.name not in seeded]
            theirs = [(r, prints) for r, (f, prints) in enumerate(told) if f == first]
            _tell_of_draws(first, {n: [r for r, x in theirs if x.get(n) != told[first][1][n]] for n in drawn_from})
    finally:
        for x in replaced:
            x.restore(own[x.name])


def _seeds_noted(names: set[str]) -> Patches:
    """Return a context that notes which generators are seeded inside."""

    def noting(name: str, seed: Callable[..., Any]) -> Callable[..., Any]:
        def seeding(*args: Any, **kwargs: Any) -> Any:
            names.add(name)
            return seed(*args, **kwargs)

        return seeding

    places: list[tuple[str, Any, str]] = [("torch's", x, "manual_seed") for x in (torch, torch.random)]
    places += [("Python's random", random, "seed"), ("numpy.random", np.random, "seed")]
    return Patches(lambda: [(owner, seed, partial(noting, name)) for name, owner, seed in places])


def check_equal(mesh: Mesh, lines: Sequence[str]) -> None:
    """Raise `RuntimeError` on every rank unless these lines, which say what a function computes, are equal on all."""
    found = _difference(FUNCTION, mesh, lines)
    if found is not None:
        first, other, differing = found
        here, there = differing[0]
        raise RuntimeError(
            f"shard: ranks {first} and {other} initialise different states, so their shards would not fit together.\n"
            f"  rank {first}: {here}\n"
            f"  rank {other}: {there}\n"
            "Use the same numbers, files and seeds inside the function on every rank. Seeds set outside the function "
            f"may differ: while it runs, the global generators of torch, Python and NumPy have rank {first}'s states "
            "on all ranks."
        )


def lines_of_values(names: Sequence[str], leaves: Sequence[Tensor]) -> list[str]:
    """Return what must be equal on all ranks of a state's values, one line a leaf."""
    return [f"{name} {'' if x.is_meta else checksum(x)}" for name, x in zip(names, leaves, strict=True)]


def values_on_first(
    mesh: Mesh, leaves: Sequence[Tensor], lines: Sequence[str], device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Return the indices and values of a state's leaves; the first rank's values, if ranks have others, with a warning.

    `lines`: of these leaves. `device`: on which tensors are sent. All ranks must call it, and take all values.
    """
    found = _difference(VALUES, mesh, lines)
    if found is None:
        return enumerate(leaves)
    first, other, differing = found
    if _is(first):
        log.warning(
            "shard: ranks %d and %d have different values of %s. All ranks use the values of rank %d. Set the same "
            "seed on every rank before you make the state, or pass the function that makes it to shard.",
            first,
            other,
            _listed([repr(line.rpartition(" ")[0]) for line, _ in differing]),
            first,
        )
    return enumerate(_sent(mesh, leaves, device))


def _sent(mesh: Mesh, leaves: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    for leaf in leaves:
        value = leaf.detach().to(device, copy=True)
        equalize([value], mesh.all)
        yield value.to(leaf.device)


def _difference(what: str, mesh: Mesh, lines: Sequence[str]) -> tuple[int, int, list[tuple[str, str]]] | None:
    """Return (a mesh's first rank, another one, the lines of both that differ), or None if no ranks of a mesh differ.

    The same on all ranks of the job, which must call it.
    """
    text = "\n".join(lines)
    told = [x.split() for x in exchange(what, f"{_first(mesh)} {fingerprint(text)}")]
    other = next((r for r, (first, found) in enumerate(told) if told[int(first)][1] != found), None)
    if other is None:
        return None
    first = int(told[other][0])
    texts = exchange(what, text if _is(first) or _is(other) else "")
    one, two = (texts[r].split("\n") for r in (first, other))
    size = max(len(one), len(two))
    pairs = zip(*(x + ["nothing more"] * (size - len(x)) for x in (one, two)), strict=True)
    return first, other, [(a, b) for a, b in pairs if a != b]


def _tell_of_draws(first: int, ranks: dict[str, list[int]]) -> None:
    found = {name: x for name, x in ranks.items() if x}
    if found:
        log.warning(
            "shard: the initialisation draws from %s, whose state differs between %s and rank %d. All ranks drew from "
            "the state of rank %d, and each rank then got its own generator state back. Set the same seed on all ranks "
            "before shard, and different seeds after it.",
            " and ".join(f"{name} generator" for name in found),
            _listed([f"rank {r}" for r in sorted({r for x in found.values() for r in x})]),
            first,
            first,
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _first(mesh: Mesh) -> int:
    """Return the number, in the job, of a mesh's first rank."""
    return mesh.ranks[0] if mesh.ranks else 0


def _is(rank: int) -> bool:
    return rank_and_size()[0] == rank


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _state(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _restore_pythons(text: str) -> None:
    version, words, gauss = json.loads(text)
    random.setstate((version, tuple(words), gauss))


def _numpys() -> str:
    return json.dumps(np.random.get_state(legacy=False), default=lambda x: x.tolist())
