"""Watch what a function does to torch's random generators while nothing is drawn from them.

A recording (see `recording`) logs random operations without running them. Seeds and states that the
function sets in between (`torch.manual_seed`, `fork_rng`, `Generator.manual_seed`, `set_rng_state`,
under whatever name they were imported) must be logged too. Nothing is patched for that: before each
draw a generator's state is set to a *mark*: its own seed, and over the state words the number of
its next event (a draw, or a state set). A state that comes back unmarked was set by the function
and is logged as it is; one that comes back with an older mark was saved before that older event,
and is logged as "save it there, restore it here".
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .._torch_compat import without_dispatch_modes

# The first words of the 624 of the Mersenne twister, which follow the seed (8 bytes) and four
# counters in the state's bytes, 8 bytes each: two words that say "a mark", then which generator and
# which event.
_MARK_BYTES = slice(24, 56)
_WORDS = slice(24, 24 + 8 * 624)
_MAGIC = (secrets.randbits(32), secrets.randbits(32))
_ROUNDS = 1000  # of 624 numbers, in which a draw that was not logged is looked for
_UNSEEN = (
    "initialisation draws random numbers where its operations are not recorded, most likely in a thread of its own. "
    "Draw in the thread that runs the function, or pass `shard` the finished state instead."
)


@dataclass(eq=False)
class SavedState:
    """A generator's state at one moment of a replay."""

    generator: torch.Generator
    state: torch.Tensor | None = None

    def save(self) -> None:
        self.state = self.generator.get_state()


@dataclass
class Restore:
    """Set `generator` to a state: a given one, or the one that was saved in the same replay."""

    generator: torch.Generator
    source: torch.Tensor | SavedState
    saves: list[SavedState] = field(default_factory=list)  # to be saved just before

    def __call__(self) -> None:
        state = self.source.state if isinstance(self.source, SavedState) else self.source
        assert state is not None
        self.generator.set_state(state)


@dataclass(eq=False)
class _Watched:
    generator: torch.Generator
    number: int
    original: torch.Tensor
    marked: torch.Tensor = field(init=False)  # the state with its last mark
    # One list for each draw and restore so far: what has to be saved just before it.
    events: list[list[SavedState]] = field(default_factory=list)


class GeneratorWatch:
    """The CPU generators that a recording has met. The default one is watched from the start."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self.reseeded = False
        with without_dispatch_modes():
            self._add(torch.default_generator)

    def before_draw(self, generator: torch.Generator) -> tuple[list[Restore], list[SavedState]]:
        """Called before a draw from `generator` is logged: what was done to the generators' states
        since the last draw, and the list in which the states to be saved just before this draw will
        appear."""
        with without_dispatch_modes():
            watched = next((w for w in self._watched if w.generator is generator), None)
            restores = [] if watched else self._add(generator)
            watched = watched or self._watched[-1]
            restores += self._restores()
            saves: list[SavedState] = []
            watched.events.append(saves)
            self._mark(watched)
        return restores, saves

    def finish(self) -> list[Restore]:
        """What was done to the states since the last draw. The generators are as they were found
        afterwards."""
        with without_dispatch_modes():
            restores = self._restores()
            self.reset()
        return restores

    def reset(self) -> None:
        """Put every generator back into the state in which it was found."""
        with without_dispatch_modes():
            for watched in self._watched:
                watched.generator.set_state(watched.original)

    def _add(self, generator: torch.Generator) -> list[Restore]:
        watched = _Watched(generator, len(self._watched), generator.get_state())
        self._watched.append(watched)
        copied = _read_mark(watched.original)
        if copied:
            return [self._restore(watched, copied)]
        self._mark(watched)
        return []

    def _restores(self) -> list[Restore]:
        restores = []
        for watched in self._watched:
            state = watched.generator.get_state()
            if torch.equal(state, watched.marked):
                continue
            mark = _read_mark(state)
            if mark == (watched.number, len(watched.events)) or not mark and _follows(state, watched.marked):
                raise RuntimeError(_UNSEEN)
            restores.append(self._restore(watched, mark or state))
        return restores

    def _restore(self, watched: _Watched, found: tuple[int, int] | torch.Tensor) -> Restore:
        """`watched` was given a state, or the one that a generator had before one of its events."""
        if isinstance(found, torch.Tensor):
            restore = Restore(watched.generator, found)
        else:
            source, event = self._watched[found[0]], found[1]
            saved = SavedState(source.generator)
            if event < len(source.events):
                source.events[event].append(saved)
                restore = Restore(watched.generator, saved)
            else:
                restore = _RestoreNow(watched.generator, saved)
        self.reseeded = True
        watched.events.append(restore.saves)
        self._mark(watched)
        return restore

    @staticmethod
    def _mark(watched: _Watched) -> None:
        state = watched.generator.get_state().numpy()
        words = np.array([*_MAGIC, watched.number, len(watched.events)], dtype=np.uint64)
        state[_MARK_BYTES] = words.view(np.uint8)
        watched.generator.set_state(torch.from_numpy(state))
        watched.marked = watched.generator.get_state()


class _RestoreNow(Restore):
    """Restore a state that its source generator still has."""

    def __call__(self) -> None:
        assert isinstance(self.source, SavedState)
        self.source.save()
        super().__call__()


def _read_mark(state: torch.Tensor) -> tuple[int, int] | None:
    """(generator number, event number) if `state` is a mark of this process."""
    words: Any = state.numpy()[_MARK_BYTES].copy().view(np.uint64)
    return (int(words[2]), int(words[3])) if (int(words[0]), int(words[1])) == _MAGIC else None


def _follows(state: torch.Tensor, marked: torch.Tensor) -> bool:
    """Return whether a generator comes from one state to the other by draws."""
    scratch = torch.Generator()
    if torch.equal(scratch.manual_seed(scratch.set_state(state).initial_seed()).get_state(), state):
        return False  # just seeded
    scratch.set_state(marked)
    for _ in range(_ROUNDS):
        torch.empty(624, dtype=torch.int32).random_(generator=scratch)
        if torch.equal(scratch.get_state()[_WORDS], state[_WORDS]):
            return True
    return False
