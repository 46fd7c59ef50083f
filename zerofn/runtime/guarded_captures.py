"""Guards: a captured step is used again only while what its capture has read outside its arguments is the same.

`guards/walk.py` says what is read: code, globals, closures, modules, configs, and the attributes that some line of the
user's names; beside them torch's settings, and what `compile(watch=)` declares. `Captures` keeps the captures of one
signature, each with the facts it was made with, so that a model may go back and forth between `train()` and `eval()`.

What was found in an object of a library's may not matter: a counter beside the value that a method returns. If nothing
else has changed, the step is captured once more on this rank alone. If that is the same graph, what has changed is
not looked at again, and the log says so.

All ranks must change what is read alike: one that captures again for that waits for the others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from .. import tree
from ..capture.changing_constants import watching
from ..graph.same_graph import Outline, difference
from ..guards.tensors import Contents
from ..guards.tokens import Facts, changed_paths, told, without
from ..guards.torch_settings import facts_of, settings_now
from ..guards.user_code import of_user
from ..guards.walk import Walk
from ..job.agreement import agree_on
from ..sharding.sharded import is_sharded
from ..training.train_state import TrainState
from ..util.by_identity import ByIdentity
from ..util.user_line import OURS
from .agreed_captures import Reading
from .captured_step import CapturedStep

log = logging.getLogger("zerofn")
CHECK = int(os.environ.get("ZEROFN_CHECK", "0"))  # every so many calls a capture is compared with one made now
KEPT = 4  # captures of one signature: those of train() and eval(), twice
_TOLD = 3  # changes that a message names
_WATCH = "To make the step follow changes, add it to zerofn.compile(watch=[...])."


def some(paths: Sequence[str], sign: str = ", ") -> str:
    """Return the first few of several texts, and how many more there are."""
    return sign.join(paths[:_TOLD]) + (f" and {len(paths) - _TOLD} more" if len(paths) > _TOLD else "")


class _Reading(NamedTuple):
    """What a step depends on now."""

    facts: Facts
    settings: tuple[Any, ...]
    reader: Walk

    def holds(self) -> bool:
        """Whether it depends on the same objects still."""
        return settings_now() == self.settings and self.reader.places.hold()


class _Kept(NamedTuple):
    """A capture, the facts it was made with, its graph, and the contents of the tensors that it closes over."""

    entry: CapturedStep
    facts: Facts
    outline: Outline
    constants: Contents


class LeftOut:
    """The paths that no capture of a step depends on, `paths`, and what the log tells of them, once each.

    `step`: the step's function. Where it is ZeroFn's own, as a Trainer's, most paths are ZeroFn's or the Trainer's, and
    users cannot pass `watch=`: of their own they find globals and classes in the log.
    """

    def __init__(self, name: str, step: Callable[..., Any] | None = None) -> None:
        self.name = name
        code = getattr(step, "__code__", None)
        self._is_ours = code is not None and code.co_filename.startswith(OURS)
        self.paths: set[str] = set()
        self._told: set[str] = set()

    def written(self, paths: Sequence[str]) -> None:
        """Leave out what the step itself writes while it is captured."""
        self.paths.update(paths)
        # A list or dict now holds a tensor without a value; attributes, such as a module's cache, are common.
        self._tell(
            paths,
            "writes %s while it is captured. Later calls do not write them again, and changes to them do not cause "
            "another capture. Return values to keep in the new state or in the metrics.",
            logging.WARNING if any(path.endswith("]") for path in paths) else logging.INFO,
        )

    def without_effect(self, paths: Sequence[str]) -> None:
        """Leave out what has changed in objects of libraries, and has changed nothing in the step."""
        self.paths.update(paths)
        self._tell(
            self._users(paths), f"%s changed, but the graph is the same, so it is not watched any more. {_WATCH}"
        )

    def frozen(self, paths: Sequence[str]) -> None:
        """Tell what is not read, so that a change to it leads to no other capture."""
        self._tell(self._users(paths), f"the values in %s are frozen at capture. {_WATCH}")

    def _users(self, paths: Sequence[str]) -> Sequence[str]:
        return [path for path in paths if path.startswith(("global ", "class "))] if self._is_ours else paths

    def _tell(self, paths: Sequence[str], text: str, level: int = logging.INFO) -> None:
        new = [path for path in dict.fromkeys(paths) if path not in self._told]
        self._told.update(new)
        if new:
            log.log(level, f"%s: {text}", self.name, some(new))


class Checks:
    """Counts the calls of a step, which are as many on all ranks, where a capture may be of one rank alone."""

    def __init__(self) -> None:
        self._num_calls = 0

    def due(self) -> bool:
        """Whether ZEROFN_CHECK is for this call."""
        self._num_calls += 1
        return bool(CHECK) and self._num_calls > 1 and (self._num_calls - 1) % CHECK == 0


class Captures:
    """The captures of one signature, the last used first.

    `watched`: what `compile(watch=)` declares, by path. `again`: capture on this rank alone, and return the graph;
    with True, slowly, so that it names lines.
    """

    def __init__(
        self, step: Callable[[Any, Any], Any], state: Any, left_out: LeftOut, watched: Sequence[Any] = ()
    ) -> None:
        self._roots = roots_of(step, state)
        self._watched = {f"watch[{k}]": x for k, x in enumerate(watched)}
        self._left_out = left_out
        self._kept: list[_Kept] = []
        self._reading: _Reading | None = None
        self._num_left_out = 0  # paths that were left out of the reading
        self.why = ""

    @property
    def entries(self) -> list[CapturedStep]:
        """All of them."""
        return [x.entry for x in self._kept]

    def find(
        self, again: Callable[[bool], Outline], prepare: Callable[[CapturedStep], object] = lambda entry: None
    ) -> CapturedStep | None:
        """Return the capture for what the step depends on now; None if there is none. `why` then says what changed.

        `prepare`: called with what is found, before it is compared with another capture.
        """
        if not self._kept or self._reading is None:
            self.why, self._reading = "", self._read()
            return None
        if not self._reading.holds():
            self._find_again(again)
        if self._kept[0].facts is not self._reading.facts:
            return None
        if not self._kept[0].constants.hold():
            self._kept.pop(0).entry.close()
            self.why = "a tensor that the step closes over was written to"
            return None
        prepare(self._kept[0].entry)
        return self._kept[0].entry

    def _find_again(self, again: Callable[[bool], Outline]) -> None:
        """Read again, and put the capture with the same facts first, if there is one."""
        assert self._reading is not None
        if self._num_left_out != len(self._left_out.paths):  # since another capture, fewer facts are read
            self._leave_out()
        before, unsure, reading = self._kept[0].facts, self._reading.reader.unsure, self._read()
        paths = changed_paths(before, reading.facts)
        if paths and unsure.union(reading.reader.unsure).issuperset(paths) and not self._differs(again):
            self._left_out.without_effect(paths)
            self._leave_out()
            before, reading = self._kept[0].facts, self._read()
        for k, kept in enumerate(self._kept):
            if kept.facts == reading.facts:
                self._kept.insert(0, self._kept.pop(k))
                self._reading = reading._replace(facts=kept.facts)
                return
        self.why = some([told(before, reading.facts, path) for path in changed_paths(before, reading.facts)], "; ")
        self._reading = reading

    def _differs(self, again: Callable[[bool], Outline], lines: bool = False) -> str:
        """Return how a capture made now would differ from the one used last: '' if it would not."""
        try:
            return difference(self._kept[0].outline, again(lines))
        except Exception as error:
            return f"it cannot be captured now: {error}"

    def _leave_out(self) -> None:
        """Forget the facts of paths that are left out by now."""
        self._num_left_out = len(self._left_out.paths)
        self._kept = [x._replace(facts=without(x.facts, self._left_out.paths)) for x in self._kept]

    def captured(self, make: Callable[[], tuple[CapturedStep, Sequence[Tensor]]]) -> CapturedStep:
        """Make a capture after `find` has found none, and keep it."""
        before = self._reading or self._read()
        with watching(before.reader.moving):
            entry, constants = make()
        after = self._read()
        is_less = not after.reader.written <= self._left_out.paths
        self._left_out.paths |= after.reader.written
        changed = changed_paths(*(without(x.facts, after.reader.written) for x in (before, after)))
        imported = [x for x in changed if x not in before.facts and _is_module(after.facts[x])]
        paths = [x for x in without(dict.fromkeys(changed), imported) if not _is_loaded(x, before.facts)]
        if paths:
            unsure = before.reader.unsure | after.reader.unsure
            self._left_out.paths |= unsure.intersection(paths)
            self._left_out.frozen([path for path in paths if path in unsure])
            self._left_out.written([path for path in paths if path not in unsure])
        if paths or is_less:
            after = self._read()
        self._left_out.frozen(after.reader.left)
        self._reading, self._num_left_out = after, len(self._left_out.paths)
        assert entry.program.outline is not None
        self._kept.insert(0, _Kept(entry, after.facts, entry.program.outline, Contents(constants)))
        for old in self._kept[KEPT:]:
            old.entry.close()
        del self._kept[KEPT:]
        return entry

    def check(self, again: Callable[[bool], Outline] | None) -> None:
        """Raise `StaleCapture` if a capture made now differs from the graph in use. All ranks must call it,
        with None where it was captured just now.
        """

        def check() -> tuple[None, str]:
            if again is not None and self._differs(again):
                raise StaleCapture(
                    f"{self._left_out.name} has changed since it was captured, because of a value that ZeroFn does not "
                    f"watch: {self._differs(again, lines=True)}. Pass this value in the batch, store it in the state, "
                    "or add it to zerofn.compile(watch=[...])."
                )
            return None, ""

        agree_on(f"ZEROFN_CHECK of {self._left_out.name}", check)

    def reading(self, state: Any) -> Reading:
        """Return what the step depends on now, given the signature of its state, with what the last capture read."""
        assert self._reading is not None
        now = self._reading
        constants = self._kept[0].constants if self._kept else None
        return Reading(state, now.facts, frozenset(now.reader.unsure), constants)

    def drop(self, entry: CapturedStep) -> None:
        """Forget a capture."""
        self._kept = [x for x in self._kept if x.entry is not entry]

    def _read(self) -> _Reading:
        settings = settings_now()
        reader = Walk(self._left_out.paths).read(self._roots, self._watched)
        return _Reading({**facts_of(settings), **reader.facts}, settings, reader)


def _is_module(token: Any) -> bool:
    last = token[-1] if isinstance(token, tuple) else None
    return isinstance(last, ByIdentity) and isinstance(last.value, ModuleType)


def _is_loaded(path: str, before: Facts) -> bool:
    """Whether a path is new and of a library's module, which has loaded it when the step first named it."""
    token = before.get(path.rpartition(".")[0], (None,))
    return path not in before and _is_module(token) and not of_user(token[-1].value)


class StaleCapture(RuntimeError):
    """A captured step is not what its function does now. Only `ZEROFN_CHECK` looks for that."""


def roots_of(step: Callable[[Any, Any], Any], state: Any) -> dict[str, Any]:
    """Return what a step starts from: itself, and the optimizers and choices of the training states in its state."""
    leaves = tree.leaves(state, is_leaf=lambda x: isinstance(x, TrainState) or is_sharded(x))
    states = [x for x in leaves if isinstance(x, TrainState)]
    roots: dict[str, Any] = {getattr(step, "__name__", "the step"): step}
    for k, x in enumerate(states):
        name = f"state {k}" if len(states) > 1 else "state"
        roots |= {f"{name}.tx": x.tx, f"{name}.frozen": x.frozen}
    return roots
