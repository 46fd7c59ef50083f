"""`Checkpoints`: the checkpoints of a run in one folder, from which it starts, resumes and comes back by itself."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from torch import Tensor

from .. import tree
from ..checkpoint import loader_state, owner, steps
from ..checkpoint.background_saves import InFlight, Saving
from ..checkpoint.folder import MANIFEST
from ..checkpoint.loader_state import HasState
from ..checkpoint.loading import load, load_copy
from ..checkpoint.locations import check_answers, is_link, is_remote, located
from ..checkpoint.saving import Along, save_along
from ..checkpoint.verifying import verify
from ..dry_run.script import current_dry_run
from ..job.agreement import rank_and_size, together, with_texts
from ..memory.turns import outside_steps
from ..util.arguments import checked
from ..util.errors import CheckpointError
from ..util.process import the
from .replicas import Replicas
from .stopping import Stopped, Stopping

log = logging.getLogger("zerofn")

WHAT = "zerofn.Checkpoints"
T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run. `restore_or` starts or resumes the run; call `after_step` after every step.

        checkpoints = zerofn.Checkpoints("runs/gpt", every=100, keep=3, loader=loader)
        state = checkpoints.restore_or(state)
        for batch in loader:
            state, metrics = step(state, batch)
            checkpoints.after_step(state, metrics)
        checkpoints.close()

    `folder`: a path or a URL that all ranks can see; checkpoints are written there as `step-00000100` and so on, by
    `zerofn.save`. `every`: number of steps between two checkpoints; None saves only when `save` is called. `keep`: how
    many of the last checkpoints stay; None for all. `keep_best=("loss", "min")`: the checkpoint with the lowest value
    of this metric (or "max", the highest) stays, too. `async_`: write checkpoints in the background. `loader`: any
    object with `state_dict()` and `load_state_dict()`, such as torchdata's `StatefulDataLoader`; the state dict of each
    rank's loader is saved with the state.

    `replicate_every`: number of steps between two copies in memory. Each rank's part is copied to the memory of its
    machine (/dev/shm) and of the next machine. If torchrun restarts the ranks after the loss of a rank or a machine,
    they continue from these copies, without reading a disk. Memory holds each part twice, and for a moment four times.
    On several machines, the number of ranks must stay the same; otherwise the run continues from the disk.

    A run that receives one of `signals`, or has trained for `time_limit` seconds, or is two minutes from the end of its
    SLURM job (`SLURM_JOB_END_TIME`), saves after its current step. It then raises `Stopped`, a `SystemExit` with
    status 75, on all ranks. Start the program again, with any number of ranks, and `restore_or` continues from this
    checkpoint. The attribute `step` is the number of steps done.

    Raises `ValueError` for options that are out of range, or have no effect together with another option.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = Checkpoints(f"{folder}/run", every=2)
    ...     state = checkpoints.restore_or({"w": torch.ones(2)})
    ...     for _ in range(5):
    ...         checkpoints.after_step(state)
    ...     checkpoints.close()
    ...     checkpoints.steps()
    [2, 4]
    """

    @checked("folder", "async_", "time_limit", "signals")
    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = 3,
        keep_best: tuple[str, Literal["min", "max"]] | None = None,
        async_: bool = True,
        loader: HasState | None = None,
        time_limit: float | None = None,
        replicate_every: int | None = None,
        signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
    ) -> None:
        signals = tuple(signals)
        _check(signals, every, keep, keep_best, loader, time_limit, replicate_every)
        self.folder, self.step = located(folder), 0
        self._every, self._keep, self._keep_best, self._async, self._loader = every, keep, keep_best, async_, loader
        self._stopping = Stopping(signals, time_limit)
        self._replicas = None if replicate_every is None else Replicas(self.folder)
        self._replicate_every = replicate_every or 0
        self._found: dict[int, str] = {}  # the saves that were there when this run began, by step
        self._damaged: set[int] = set()
        self._stuck: set[Path] = set()  # what could not be removed, and was told
        self._begun = self._told = False

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in ascending order."""
        return steps.complete_steps(self.folder)

    def _listed(self) -> list[int]:
        check_answers(self.folder / MANIFEST)
        if not is_remote(self.folder):
            there = next(p for p in (self.folder, *self.folder.parents) if p.exists())
            if not there.is_dir():
                raise CheckpointError(
                    f"{WHAT}: {there} is a file, so {self.folder} cannot be a folder. Choose another path."
                )
            if self._every is not None and rank_and_size()[0] == 0 and not os.access(there, os.W_OK):
                log.warning("%s: %s is not writable, so the first save will fail.", WHAT, there)
        return self.steps()

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be: for `zerofn.load`, `export` and `verify`."""
        return steps.path_of(self.folder, step)

    def best_step(self) -> int | None:
        """Return the step whose checkpoint is best by `keep_best`; None if no checkpoint has this metric."""
        if self._keep_best is None:
            raise ValueError(f"{WHAT}: the best checkpoint is not defined. Write keep_best=(name, 'min' or 'max').")
        return steps.best_step(self.folder, set(self.steps()) - self._damaged, *self._keep_best)

    @overload
    def restore_or(self, init_state: Callable[[], T]) -> T: ...
    @overload
    def restore_or(self, init_state: T) -> T: ...
    @outside_steps(f"{WHAT}.restore_or")
    def restore_or(self, init_state: Any) -> Any:
        """Return the state of the newest checkpoint, with the layout of `init_state`; without a checkpoint, return
        `init_state` itself.

        Every rank must call it, once, before the first step. `init_state` may be a function that makes the state; it is
        donated, since the checkpoint is read into its memory. The number of ranks, the stage and the tiers may differ
        from the saved run. A checkpoint with damaged bytes is skipped, with a warning, and the previous one is used.
        The loader continues at its saved position.

        Raises `CheckpointError` if all checkpoints are damaged, if the newest belongs to another model, or if each
        rank's loader had its own position and the number of ranks has changed.
        """
        if self._begun:
            raise ValueError(f"{WHAT}: restore_or was already called. For another run, make another Checkpoints.")
        state: Any = init_state() if callable(init_state) else init_state
        if current_dry_run() is not None:  # a plan is of the model as it is written, not of what a run has left here
            self._begun = True
            return state
        self._stopping.listen()
        try:
            return self._restored(state)
        except BaseException:
            self._stopping.close()
            raise

    def _restored(self, state: Any) -> Any:
        if self._replicas is not None:
            self._replicas.begin()
        what = f"{WHAT}.restore_or"
        listed = json.loads(with_texts(what, lambda: (None, json.dumps(self._listed())))[1][0])
        said: list[str] = []
        for step, path, in_memory in self._candidates(listed):
            try:
                where = together(what, partial(loader_state.read, self._loader, path))
                if in_memory:
                    loaded = load_copy(path, state, f"step {step} in memory")
                else:
                    loaded = load(path, like=state, donate=True)
            except CheckpointError as error:
                faults = [str(error)] if in_memory else verify(path)
                if not faults:
                    raise
                log.warning("%s: %s is skipped: %s", WHAT, path, faults[0])
                if not in_memory:
                    self._damaged.add(step)
                    said += faults
                continue
            together(what, partial(loader_state.go_on, self._loader, where))
            self._begin(step, listed)
            log.info("%s: the run continues after step %d, from %s.", WHAT, step, path)
            return loaded
        if said:
            raise CheckpointError(
                f"{WHAT}: all {len(listed)} checkpoints in {self.folder} are damaged. The newest: {said[0]} To start a "
                "new run, use another folder."
            )
        self._begin(0, [])
        return state

    @outside_steps(f"{WHAT}.after_step")
    def after_step(self, state: Any, metrics: Any = None) -> None:
        """Count a step; save every `every` steps, and when the run must end. Every rank must call it after each step.

        `metrics`: its numbers (rank 0's) are saved with each checkpoint, under their key paths.

        Raises the errors of `zerofn.save`, and `Stopped` after the last save of a run that must end.
        """
        self._check_begun("after_step")
        self.step += 1
        reason = self._stopping.due()
        if reason or (self._every is not None and self.step % self._every == 0):
            self.save(state, metrics, wait=bool(reason) or not self._async)
        elif self._replicas is not None and self.step % self._replicate_every == 0:
            self._replicas.keep(self.step, state, self._along(metrics))
        if reason:
            self._stopping.answer()
            if self._replicas is not None:
                self._replicas.close()
            raise Stopped(f"stopped after step {self.step}, because of {reason}. The state is saved in {self.folder}.")

    @outside_steps(f"{WHAT}.save")
    def save(self, state: Any, metrics: Any = None, *, wait: bool = True) -> Saving:
        """Save now, at any step, for example after the last one. Every rank must call it; otherwise like
        `zerofn.save`."""
        self._check_begun("save")
        self._tell_of_no_metric(_numbers(metrics))
        return save_along(self.path(self.step), state, wait, self._along(metrics))

    def _tell_of_no_metric(self, numbers: dict[str, float]) -> None:
        if self._keep_best is not None and self._keep_best[0] not in numbers and not self._told:
            self._told = True
            there = ", ".join(map(repr, numbers)) or "none"
            log.warning(
                "%s: keep_best=%r, but step %d has only the metrics %s, so it cannot be the best.",
                WHAT, self._keep_best, self.step, there,
            )  # fmt: skip

    def _along(self, metrics: Any) -> Along:
        notes, step = {"metrics": _numbers(metrics)}, self.step
        return Along(notes, self._loader, before=lambda: self._check_alone(step), after=lambda: self._remove_old(step))

    def close(self) -> None:
        """End the run: wait until the current checkpoint is complete, stop handling signals, and free the memory of
        copies.

        Raises `CheckpointError` if this checkpoint failed, and `Stopped` if a signal arrived after the last step, so
        that the program ends instead of running the code that follows.
        """
        came = self._stopping.close()
        the(InFlight).finish()
        if self._replicas is not None:
            self._replicas.close()
        if came is not None:
            stopped = Stopped(
                f"stopped when the run was closed, because of {came.name}, after step {self.step}. {self.folder} has "
                f"steps {self.steps()}."
            )
            log.warning("%s: %s", WHAT, stopped)
            raise stopped

    def _check_begun(self, what: str) -> None:
        if not self._begun:
            raise ValueError(
                f"{WHAT}.{what}: call restore_or(state) first, so that the run continues from the checkpoints in "
                f"{self.folder}, and does not overwrite them."
            )

    def _candidates(self, listed: list[int]) -> Iterator[tuple[int, Path, bool]]:
        """Yield (step, path, whether it is in memory) of what the run can continue from, the newest first."""
        copies = iter(()) if self._replicas is None else self._replicas.copies()
        copy = next(copies, None)
        for step in (*reversed(listed), -1):
            while copy is not None and copy[0] >= step:
                yield *copy, True
                copy = next(copies, None)
            if step >= 0:
                yield step, self.path(step), False

    def _begin(self, step: int, listed: list[int]) -> None:
        """Go on after a step."""
        self._begun, self.step = True, step
        self._found = {s: steps.saved_by(self.folder, s).get("save", "") for s in listed}

    def _check_alone(self, step: int) -> None:
        """On rank 0: raise `CheckpointError` if another job has saved to this folder since the run began."""
        mine = the(owner.ThisProcess)
        if is_link(self.path(step)):
            raise CheckpointError(
                f"{WHAT}: {self.path(step)} is a link, so saving would overwrite {located(self.path(step))}. Step "
                f"{step} was not saved. Remove the link."
            )
        for s in self.steps():
            found = steps.saved_by(self.folder, s)
            if found and found.get("job") != mine.name and found.get("save") != self._found.get(s):
                raise CheckpointError(
                    f"{WHAT}: {self.path(s)} was saved by another job (process {found.get('pid')} on "
                    f"{str(found.get('host')).partition(' ')[0]}) since this one began. Step {step} was not saved. Use "
                    "a different folder for each run."
                )

    def _remove_old(self, newest: int) -> None:
        """On rank 0, when a checkpoint is complete: remove those that are not to be kept, and what killed processes
        have left. Damaged ones go when the run has passed them. What cannot be removed stays.
        """
        with self._told_once(self.folder):
            there = self.steps()
            self._damaged.discard(newest)
            good = [s for s in there if s not in self._damaged]
            kept = set(good if self._keep is None else good[-self._keep :])
            kept |= {s for s in self._damaged if s > newest}
            if self._keep_best is not None:
                best = steps.best_step(self.folder, good, *self._keep_best)
                kept.add(newest if best is None else best)
            for path in (self.path(s) for s in there if s not in kept):
                with self._told_once(path):
                    steps.remove(path)
            now = owner.touched(self.path(newest) / MANIFEST)[0]
            for path in steps.folders(self.folder).values():
                with self._told_once(path):
                    steps.clear(path, now)

    @contextlib.contextmanager
    def _told_once(self, path: Path) -> Iterator[None]:
        """Log what goes wrong as something at `path` is removed."""
        try:
            yield
        except Exception as error:  # a network's errors are of many kinds
            if path not in self._stuck:
                log.warning("%s: the old checkpoint %s could not be removed, and stays: %s", WHAT, path, error)
                self._stuck.add(path)


def _check(
    signals: Any, every: Any, keep: Any, keep_best: Any, loader: Any, time_limit: Any, replicate_every: Any
) -> None:
    for each in signals:
        if not isinstance(each, int) or isinstance(each, bool) or each not in signal.valid_signals():
            raise ValueError(f"{WHAT}: signals must be signals such as signal.SIGTERM, got {each!r}.")
    for name, value in (("every", every), ("keep", keep), ("replicate_every", replicate_every)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(
                f"{WHAT}: {name} must be a number of steps or checkpoints, 1 or more, or None; got {value!r}."
            )
    if replicate_every is not None and every is not None and replicate_every % every == 0:
        raise ValueError(
            f"{WHAT}: replicate_every={replicate_every} has no effect, because every={every} saves these steps "
            "already. Write a number smaller than every."
        )
    if keep_best is not None:
        if not (isinstance(keep_best, tuple) and len(keep_best) == 2 and keep_best[1] in ("min", "max")):
            raise ValueError(
                f"{WHAT}: keep_best must be a metric and 'min' or 'max', such as ('loss', 'min'); got {keep_best!r}."
            )
        if keep is None:
            raise ValueError(
                f"{WHAT}: keep=None keeps all checkpoints, so keep_best has no effect. Leave one of them out."
            )
    if loader is not None and not all(callable(getattr(loader, f, None)) for f in ("state_dict", "load_state_dict")):
        raise ValueError(
            f"{WHAT}: loader must have state_dict() and load_state_dict(), but a {type(loader).__name__} does not. Use "
            "torchdata's StatefulDataLoader, or pass loader=None and store the number of seen samples in the state."
        )
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"{WHAT}: time_limit must be a number of seconds above 0, or None; got {time_limit!r}.")


def _numbers(metrics: Any) -> dict[str, float]:
    """Return the real numbers of a tree, by key path."""
    leaves, treedef = tree.flatten(metrics)
    found = {}
    for name, x in zip(tree.field_names(treedef), leaves, strict=True):
        if isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1 and not (x.is_complex() or x.is_meta)):
            with contextlib.suppress(OverflowError):  # an integer that no float can be
                found[name] = float(x)
    return found
