"""A run's newest state in the memory of its machines, so that a rank, or a machine, that is lost costs no disk.

Each rank writes its file of a checkpoint to its machine's memory (/dev/shm), where it outlives the process, and a
thread sends it to a rank of the next machine, where it outlives the machine. What starts the ranks again is what keeps
running, so the folder in memory has the name of that process: another job never finds it, and the next run on the
machine removes it once that process has ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..checkpoint import folder, steps
from ..checkpoint.background_saves import Saving
from ..checkpoint.manifest import read_manifest
from ..checkpoint.saving import Along, OneSave, prepared, write_all
from ..checkpoint.tensor_file import FileIdentity
from ..job.agreement import exchange, rank_and_size, together, with_texts
from ..util.errors import CheckpointError
from ..util.other_processes import machine, started

log = logging.getLogger("zerofn")

WHAT = "zerofn.Checkpoints(replicate_every=)"
MEMORY = Path("/dev/shm")
_OF_RUN = re.compile(r"([1-9]\d{0,9})-(\d{1,19})-[0-9a-f]{12}")  # what starts the ranks, when it began; and the run
_PIECE = 4 << 20  # bytes that are sent at a time


class _Transfer(NamedTuple):
    """A file that goes from one rank to another, into the folder of the other's machine."""

    name: str
    nbytes: int
    source: int
    target: int


class _Copy(NamedTuple):
    """A copy that is in a machine's memory. `sizes`: bytes of all its files, by name; `files`: those that are there.
    `own`: whether a rank reads its own file and rank 0's alone, and not those of others with the same shards or slices.
    """

    step: int
    save: str
    num_ranks: int
    sizes: dict[str, int]
    files: list[str]
    own: bool


class Replicas:
    """The copies of a run. `run`: where its checkpoints lie. All ranks must make one, and call its methods together.

    Raises `ValueError` where nothing starts ranks again, or there is no such memory.
    """

    def __init__(self, run: Path) -> None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ValueError(
                f"{WHAT}: copies in memory help only if ranks are restarted, but this job has no launcher that "
                "restarts them. Start the script with torchrun --max-restarts 3, or leave replicate_every out."
            )
        if not MEMORY.is_dir():
            raise ValueError(
                f"{WHAT}: this system has no {MEMORY}, a file system in memory. Leave replicate_every out."
            )
        self.folder = MEMORY / f"{_of_machine()}{os.getppid()}-{started(os.getppid())}-{_hash(str(run))}"
        self._sending: Saving | None = None
        self._pid = os.getpid()
        self._ranks: dict[str, list[int]] = {}  # by machine
        self._group: dist.ProcessGroup | None = None

    def begin(self) -> None:
        """Make the folder, remove those whose jobs have ended, and see who is on which machine."""
        together(WHAT, self._make)
        for rank, host in enumerate(exchange(WHAT, machine())):
            self._ranks.setdefault(host, []).append(rank)
        if len(self._ranks) > 1:
            self._group = dist.new_group(backend="gloo")
        elif rank_and_size()[1] > 1:
            log.info(
                "%s: all ranks are on one machine, so copies survive the end of processes, but not of the machine.",
                WHAT,
            )

    def keep(self, step: int, state: Any, along: Along) -> None:
        """Write this rank's file to memory, and send it to the next machine behind the steps. Raises as `save`, and
        what the one before has raised.
        """
        path = steps.path_of(self.folder, step)
        job = prepared(path, state, along, f"step {step} in memory", before=self.finish)
        together(WHAT, lambda: path.mkdir(exist_ok=True))
        files = write_all(job, lambda: job.entries)
        self._sending = Saving(path, 0.0)
        self._sending.begin("zerofn-replicas", " of replicas", lambda: self._complete(job, files, job.manifest(files)))

    def finish(self) -> None:
        """Wait for what is being sent. Raises `CheckpointError` if that failed."""
        sending, self._sending = self._sending, None
        try:
            if sending is not None:
                sending.wait()
        except Exception as error:
            raise CheckpointError(f"{WHAT}: the previous copy failed: {error}") from error

    def copies(self) -> Iterator[tuple[int, Path]]:
        """Yield the steps that are whole in memory, the newest first, with a folder in which `load` finds what it
        reads here, fetched from the machines that have it.
        """
        mine = _there(self.folder) if self._is_first_here() else []
        theirs = [[_Copy(*x) for x in json.loads(text)] for text in exchange(WHAT, json.dumps(mine))]
        for step, save in sorted({(x.step, x.save) for each in theirs for x in each}, reverse=True):
            held = {r: x for r, each in enumerate(theirs) for x in each if (x.step, x.save) == (step, save)}
            try:
                whole = self._fetch(held)
            except CheckpointError as error:
                log.warning("%s: the copy of step %d in memory is skipped: %s", WHAT, step, error)
                continue
            if whole:
                yield step, steps.path_of(self.folder, step)

    def close(self) -> None:
        """Free the memory: the run has ended, or is saved. A process that was forked in it frees nothing. Raises as
        `finish`.
        """
        if os.getpid() != self._pid:
            return
        try:
            self.finish()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self) -> None:
        for other in MEMORY.glob(f"{_of_machine()}*"):
            # What has another name, or is not a folder of this user, belongs to somebody else.
            found = _OF_RUN.fullmatch(other.name.removeprefix(_of_machine()))
            if found is not None and started(int(found[1])) != int(found[2]) and _is_own_folder(other):
                shutil.rmtree(other, ignore_errors=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_own_folder(self.folder) or self.folder.stat().st_mode & 0o77:
            raise CheckpointError(f"{WHAT}: {self.folder} exists and belongs to another user. Remove it.")

    def _complete(self, job: OneSave, files: dict[str, FileIdentity], manifest: str) -> None:
        """Send and receive, and let the manifest of each machine name the files."""
        moves = [] if self._group is None else list(self._to_neighbours(job, files))
        together(WHAT, lambda: self._move(job.path, moves))
        text = exchange(WHAT, manifest if job.rank == 0 else "")[0]
        together(WHAT, lambda: self._put(job.path, text, job.number))
        together(WHAT, lambda: self._remove_all_but(job.path, files))

    def _to_neighbours(self, job: OneSave, files: dict[str, FileIdentity]) -> Iterable[_Transfer]:
        first, *others = self._ranks.values()
        for here, after in zip(self._ranks.values(), [*others, first], strict=True):
            for k, rank in enumerate(here):
                name = folder.file_of(rank, job.size, job.number)
                if name in files:
                    yield _Transfer(name, files[name].nbytes, rank, after[k % len(after)])

    def _is_first_here(self) -> bool:
        return any(rank_and_size()[0] == ranks[0] for ranks in self._ranks.values())

    def _put(self, path: Path, manifest: str, number: str) -> None:
        if self._is_first_here():
            folder.replace_text(path / folder.MANIFEST, manifest, number)

    def _remove_all_but(self, path: Path, files: Iterable[str]) -> None:
        if self._is_first_here():
            for old in steps.folders(self.folder).values():
                if old != path and old.is_dir():
                    steps.remove(old)
            for file in folder.left_behind(path, list(files)):
                file.unlink(missing_ok=True)

    def _move(self, path: Path, moves: Iterable[_Transfer]) -> None:
        """Do the transfers that this rank takes part in, a piece of each at a time."""
        rank, group = rank_and_size()[0], self._group
        mine = [(k, move) for k, move in enumerate(moves) if rank in (move.source, move.target)]
        opened = {k: (path / m.name).open("rb" if m.source == rank else "wb") for k, m in mine}
        try:
            for start in range(0, max((m.nbytes for _, m in mine), default=0), _PIECE):
                works = []
                for k, m in mine:
                    count, sends = min(_PIECE, m.nbytes - start), m.source == rank
                    if count > 0 and group is not None:
                        here = bytearray(opened[k].read(count) if sends else count)
                        piece = torch.frombuffer(here, dtype=torch.uint8)
                        work = group.send([piece], m.target, k) if sends else group.recv([piece], m.source, k)
                        works.append((k, here, sends, work))
                for k, here, sends, work in works:
                    work.wait()
                    if not sends:
                        opened[k].write(here)
        finally:
            for file in opened.values():
                file.close()

    def _fetch(self, held: dict[int, _Copy]) -> bool:
        """Let every machine have the files that its ranks load; False if the copy is not whole, or of other ranks.

        `held`: what the first rank of each machine has found there.
        """
        copy, (rank, size) = next(iter(held.values())), rank_and_size()
        path, files = steps.path_of(self.folder, copy.step), copy.sizes
        several = len(self._ranks) > 1
        if not set(files) <= {f for x in held.values() for f in x.files} or (several and copy.num_ranks != size):
            log.info(
                "%s: the copy of step %d in memory is incomplete, or was made by %d ranks.",
                WHAT,
                copy.step,
                copy.num_ranks,
            )
            return False
        moves = []
        for ranks in self._ranks.values() if several else ():
            needed = {folder.file_of(r, size, copy.save) for r in ((0, *ranks) if copy.own else range(size))} & set(
                files
            )
            for name in sorted(needed - set(held[ranks[0]].files if ranks[0] in held else ())):
                source = next(r for r, x in held.items() if name in x.files)
                moves.append(_Transfer(name, files[name], source, ranks[0]))
        giver = next(iter(held))
        text = with_texts(WHAT, lambda: (None, (path / folder.MANIFEST).read_text() if rank == giver else ""))[1][giver]
        together(WHAT, lambda: path.mkdir(exist_ok=True))
        together(WHAT, lambda: self._move(path, moves))
        together(WHAT, lambda: self._put(path, text, copy.save))
        return True


def _there(memory: Path) -> list[_Copy]:
    """Return what is in this machine's memory."""
    found = []
    for step in steps.complete_steps(memory):
        path = steps.path_of(memory, step)
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        sizes = {name: written.nbytes for name, written in manifest.files.items()}
        names = [p.name for p in path.iterdir() if p.is_file() and sizes.get(p.name) == p.stat().st_size]
        own = all(len(t.files) == manifest.world_size and not t.packed for t in manifest.trees)
        found.append(_Copy(step, str(manifest.saved.get("save")), manifest.world_size, sizes, names, own))
    return found


def _of_machine() -> str:
    """What the names of this user's folders on this machine begin with."""
    return f"zerofn-{os.getuid()}-{_hash(machine())}-"


def _is_own_folder(path: Path) -> bool:
    """Whether this is a folder, and no link to one, of this user; False for what has just gone."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
