"""Guards: a captured step is used again only while all that its capture has read outside its arguments is the same.

Read are: the globals, closure cells, defaults and attributes that the user's own functions use, from the step and the
state's optimizer on; the modules among them with their modes, attributes, parameters, children and hooks; configs;
and torch's settings. `Captures` keeps the captures of one signature, each with the facts it was made with, so that a
model may go back and forth between `train()` and `eval()`.

Lists and dicts are read up to 1,024 entries, larger ones by their length. Closed-over tensors are followed by identity
and version, those of up to 4 KiB by their bytes. Not followed: what functions of installed packages look up, values
reached only by computed names, and what the step itself writes when it is captured, which is logged once. All ranks
must change what is followed alike: one that captures again alone waits for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import tree
from ..sharding.sharded import is_sharded
from ..training.train_state import TrainState
from .contents import Contents
from .entry import Entry
from .facts import Facts, changed_paths, told, without
from .places import Places
from .reader import Reader
from .torch_settings import facts_of, settings_now

log = logging.getLogger("zerofn")
KEPT = 4  # captures of one signature: those of train() and eval(), twice
_TOLD = 3  # changes that a message names


class _Reading(NamedTuple):
    """What a step depends on now."""

    facts: Facts
    places: Places
    settings: tuple[Any, ...]
    modules: dict[str, nn.Module]

    def holds(self) -> bool:
        """Whether it depends on the same objects still."""
        return settings_now() == self.settings and self.places.hold()


class _Kept(NamedTuple):
    """A capture, the facts it was made with, and the contents of the tensors that it closes over."""

    entry: Entry
    facts: Facts
    constants: Contents


class Written:
    """The paths that a step itself writes while it is captured, which no capture can depend on. Each is told once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.paths: set[str] = set()

    def add(self, paths: Sequence[str]) -> None:
        """Add paths, and log those that are new."""
        new = [path for path in paths if path not in self.paths]
        self.paths.update(new)
        if new:
            more = f" and {len(new) - _TOLD} more" if len(new) > _TOLD else ""
            # A list or dict now holds a tensor without a value; attributes, such as a module's cache, are common.
            log.log(
                logging.WARNING if any(path.endswith("]") for path in new) else logging.INFO,
                "%s: writes %s%s when it is captured. A captured step does not write them again, and a change to them "
                "does not lead to another capture; return what must be kept in the new state or in aux.",
                self._name,
                ", ".join(new[:_TOLD]),
                more,
            )


class Captures:
    """The captures of one signature, the last used first."""

    def __init__(self, step: Callable[[Any, Any], Any], state: Any, written: Written) -> None:
        self._roots = roots_of(step, state)
        self._written = written
        self._kept: list[_Kept] = []
        self._reading: _Reading | None = None
        self._num_written = 0  # paths that were left out of the reading
        self.why = ""

    @property
    def entries(self) -> list[Entry]:
        """All of them."""
        return [x.entry for x in self._kept]

    def find(self) -> Entry | None:
        """Return the capture for what the step depends on now; None if there is none. `why` then says what changed."""
        if not self._kept or self._reading is None:
            self.why, self._reading = "", self._read()
            return None
        if not self._reading.holds():
            self._find_again()
        if self._kept[0].facts is not self._reading.facts:
            return None
        if not self._kept[0].constants.hold():
            self._kept.pop(0).entry.close()
            self.why = "a tensor that the step closes over was written to"
            return None
        return self._kept[0].entry

    def _find_again(self) -> None:
        """Read again, and put the capture with the same facts first, if there is one."""
        if self._num_written != len(self._written.paths):  # since another capture, fewer facts are read
            self._num_written = len(self._written.paths)
            self._kept = [x._replace(facts=without(x.facts, self._written.paths)) for x in self._kept]
        before = self._kept[0].facts
        reading = self._read()
        for k, kept in enumerate(self._kept):
            if kept.facts == reading.facts:
                self._kept.insert(0, self._kept.pop(k))
                self._reading = reading._replace(facts=kept.facts)
                return
        paths = changed_paths(before, reading.facts)
        more = f" and {len(paths) - _TOLD} more changes" if len(paths) > _TOLD else ""
        self.why = "; ".join(told(before, reading.facts, path) for path in paths[:_TOLD]) + more
        self._reading = reading

    def captured(self, make: Callable[[], tuple[Entry, Sequence[Tensor]]]) -> Entry:
        """Make a capture after `find` has found none, and keep it."""
        before = self._reading or self._read()
        entry, constants = make()
        after = self._read()
        if paths := changed_paths(before.facts, after.facts):
            self._written.add(paths)
            after = self._read()
        self._reading, self._num_written = after, len(self._written.paths)
        self._kept.insert(0, _Kept(entry, after.facts, Contents(constants)))
        for old in self._kept[KEPT:]:
            old.entry.close()
        del self._kept[KEPT:]
        return entry

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that the step was found to use, by path."""
        return self._reading.modules if self._reading is not None else {}

    def drop(self, entry: Entry) -> None:
        """Forget a capture."""
        self._kept = [x for x in self._kept if x.entry is not entry]

    def _read(self) -> _Reading:
        settings = settings_now()
        reader = Reader(self._written.paths).read(self._roots)
        return _Reading({**facts_of(settings), **reader.facts}, reader.places, settings, reader.modules)


def roots_of(step: Callable[[Any, Any], Any], state: Any) -> dict[str, Any]:
    """Return what a step starts from: itself, and the optimizers and choices of the training states in its state."""
    leaves = tree.leaves(state, is_leaf=lambda x: isinstance(x, TrainState) or is_sharded(x))
    states = [x for x in leaves if isinstance(x, TrainState)]
    roots: dict[str, Any] = {getattr(step, "__name__", "the step"): step}
    for k, x in enumerate(states):
        name = f"state {k}" if len(states) > 1 else "state"
        roots |= {f"{name}.tx": x.tx, f"{name}.frozen": x.frozen}
    return roots
