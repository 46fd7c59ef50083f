"""A training with faults: it must end with the bits of the one that nothing happened to.

    python -m benchmarks.checkpoint.chaos [--faults 200] [--seed 0]

Ranks are killed and frozen, whole jobs are killed and come back with other numbers of ranks, disks are full or slow,
and bits of checkpoints flip. torchrun starts failed ranks again; nothing else is done for the training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

import zerofn
from benchmarks.common.processes import HERE
from benchmarks.common.report import surroundings
from zerofn.checkpoint.steps import complete_steps, path_of

SIZES = (1, 2, 4)
PATIENCE = 10.0  # seconds without a sign of life until a rank is given up
SHUTDOWN = 5  # seconds that torchrun gives ranks to end
LIMIT = 30.0  # seconds of a recovery, from the kill to the next step
HANGS = 180.0  # seconds without a step: the run has not come back


class Line:
    """A line of a rank's log: by which process, when (seconds since 1970), after which step, the loss's bits."""

    def __init__(self, text: str) -> None:
        pid, when, step, self.loss = text.split()
        self.pid, self.when, self.step = int(pid), float(when), int(step)


class Job:
    """One start of torchrun, in a session of its own."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command += ["--max-restarts", "100", "--monitor-interval", "0.1", "--shutdown-timeout", str(SHUTDOWN)]
        command += ["-m", "benchmarks.checkpoint.training", str(folder)]
        with (folder / "printed.txt").open("a") as printed:
            self._agent = subprocess.Popen(
                command, env=environment(), stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return children(self._agent.pid)

    def ended(self) -> bool:
        return self._agent.poll() is not None

    def kill(self) -> None:
        """All of it, at once."""
        ranks = self.ranks()
        for pid in (self._agent.pid, *ranks):
            send(pid, signal.SIGKILL)
        self._agent.wait()

    def stop(self) -> None:
        """Ask it to save and end, as a scheduler does."""
        self._agent.send_signal(signal.SIGTERM)
        self._agent.wait(HANGS)


def environment() -> dict[str, str]:
    """Of the training's processes."""
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ZEROFN_PATIENCE": f"{PATIENCE:g}"}


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [x.pid for x in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def send(pid: int, what: signal.Signals) -> None:
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        pass


class Chaos:
    """A run and what happens to it. `records`: a fault each, with the seconds and steps that it cost."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.records: list[dict[str, Any]] = []
        self.checkpoints = folder / "checkpoints"
        self.job = Job(folder, 2)
        self._await_step(time.time())

    FAULTS: dict[str, Callable[[Chaos], bool]] = {}  # each returns whether steps are lost

    def disturb(self, kind: str) -> None:
        """Let one thing happen, and wait until the training goes on."""
        time.sleep(self.random.uniform(0.2, 2.0))
        before = self._lines()[-1].step
        start = time.time()
        recovers = self.FAULTS[kind](self)
        start = max(start, self._since) if recovers else start
        line = self._await_step(start, new=recovers)
        reached = [x.step for x in self._lines() if x.when < line.when][-1]  # perhaps itself a step that is done again
        lost = max(0, reached - line.step + 1) if recovers else 0
        seconds = line.when - start if recovers else 0.0
        self.records.append({"fault": kind, "ranks": self.job.size, "seconds": seconds, "steps": lost, "at": before})

    _since = 0.0  # when the last fault was over, if that was not at once

    def kill_a_rank(self) -> bool:
        self._killed = self._a_rank()
        send(self._killed, signal.SIGKILL)
        return True

    def kill_the_job(self) -> bool:
        self._restart(lambda: None)
        return True

    def freeze_a_rank(self) -> bool:
        """For good: the others give it up, and torchrun kills it."""
        send(self._a_rank(), signal.SIGSTOP)
        return self.job.size > 1 or self._restart(lambda: None)

    def pause_a_rank(self) -> bool:
        rank = self._a_rank()
        send(rank, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.5, 4.0))
        send(rank, signal.SIGCONT)
        return False

    def fill_the_disk(self) -> bool:
        """Until a save has failed of it."""
        old = set(self.job.ranks())
        (self.folder / "faults").write_text("full")
        end = time.time() + HANGS
        while old & set(self.job.ranks()) and time.time() < end:
            time.sleep(0.05)
        self._since = time.time()
        (self.folder / "faults").unlink()
        return True

    def slow_the_disk(self) -> bool:
        (self.folder / "faults").write_text(f"slow {self.random.uniform(1.0, 3.0):.1f}")
        time.sleep(self.random.uniform(1.0, 8.0))
        (self.folder / "faults").unlink()
        return False

    def flip_a_bit(self) -> bool:
        """In the newest checkpoint, while nothing runs."""

        def flip() -> None:
            newest = path_of(self.checkpoints, complete_steps(self.checkpoints)[-1])
            file = self.random.choice(sorted(p for p in newest.iterdir() if p.name != "zerofn-saving.json"))
            data = bytearray(file.read_bytes())
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            file.write_bytes(data)

        return self._restart(flip)

    def end_by_a_signal(self) -> bool:
        self.job.stop()
        self._since = time.time()
        return self._restart(lambda: None)

    def _restart(self, meanwhile: Callable[[], None]) -> bool:
        """With another number of ranks."""
        self.job.kill()
        meanwhile()
        self._old = self._pids()
        self.job = Job(self.folder, self.random.choice([n for n in SIZES if n != self.job.size]))
        return True

    def _a_rank(self) -> int:
        return self.random.choice(self.job.ranks() or [self.job._agent.pid])

    def _lines(self) -> list[Line]:
        """Of rank 0's log, without a last one that is half written."""
        file = self.folder / "log-0.txt"
        text = file.read_text() if file.exists() else ""
        return [Line(x) for x in text[: text.rfind("\n") + 1].splitlines() if x.count(" ") == 3]

    def _pids(self) -> set[int]:
        return {x.pid for x in self._lines()}

    def _await_step(self, since: float, new: bool = True) -> Line:
        """Return the first step after a moment; `new`: of a process that had done none before it."""
        end = time.time() + HANGS
        while time.time() < end:
            if self.job.ended():  # torchrun itself has given up
                self._restart(lambda: None)
            lines = self._lines()
            old = {x.pid for x in lines if x.when <= since} if new else set()
            found = [x for x in lines if x.when > since and x.pid not in old]
            if found:
                return found[0]
            time.sleep(0.05)
        raise RuntimeError(f"no step within {HANGS:.0f} s; see {self.folder / 'printed.txt'}")

    def finish(self) -> int:
        """End the run, once it is past all that was done; return its last step."""
        furthest = max(x.step for x in self._lines())
        while self._await_step(time.time(), new=False).step <= furthest:
            pass
        self.job.stop()
        return complete_steps(self.checkpoints)[-1]


Chaos.FAULTS = {
    "a rank is killed": Chaos.kill_a_rank,
    "the job is killed": Chaos.kill_the_job,
    "a rank is frozen": Chaos.freeze_a_rank,
    "a rank is paused": Chaos.pause_a_rank,
    "the disk is full": Chaos.fill_the_disk,
    "the disk is slow": Chaos.slow_the_disk,
    "a bit flips": Chaos.flip_a_bit,
    "a signal ends it": Chaos.end_by_a_signal,
}


def kinds(number: int, seed: int) -> Iterator[str]:
    """Each kind about as often, in a random order."""
    shuffled, drawn = list(Chaos.FAULTS), random.Random(seed)
    for k in range(number):
        if k % len(shuffled) == 0:
            drawn.shuffle(shuffled)
        yield shuffled[k % len(shuffled)]


def undisturbed(folder: Path, until: int) -> dict[str, torch.Tensor]:
    """The run that nothing happens to, in one process; its parameters, moments and so on, by name."""
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.checkpoint.training", str(folder), "--until", str(until)]
    subprocess.run([*command, "--every", str(until)], env=environment(), check=True)
    return tensors(folder, until)


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    out = zerofn.export(path_of(folder / "checkpoints", step), folder / "all.safetensors", part="")
    return load_file(out[0])


def differences(chaos: Chaos, folder: Path, last: int) -> list[str]:
    """What differs between the run and one that nothing happens to: losses of steps, and the last state."""
    right = undisturbed(folder, last)
    losses = {x.step: x.loss for x in map(Line, (folder / "log-0.txt").read_text().splitlines())}
    found = [f"loss of step {x.step}" for x in chaos._lines() if x.loss != losses[x.step]]
    ours = tensors(chaos.folder, last)
    return found + [name for name in right if not torch.equal(ours[name], right[name])] + sorted(set(ours) ^ set(right))


def run(folder: Path, faults: Iterable[str], seed: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Disturb a training; return what happened, and what differs at the end. Raises if it does not come back."""
    start, chaos = time.time(), Chaos(folder, seed)
    try:
        for kind in faults:
            chaos.disturb(kind)
            done = chaos.records[-1]
            say(f"{len(chaos.records):>4} {kind:<18} {done['seconds']:5.1f} s, {done['steps']:>3} steps done again")
        last = chaos.finish()
    finally:
        chaos.job.kill()
    steps = len(chaos._lines())
    return {
        "faults": chaos.records,
        "seconds": time.time() - start,
        "last_step": last,
        "steps_done": steps,
        "different": differences(chaos, folder / "undisturbed", last),
        "seed": seed,
    }


def table(result: dict[str, Any]) -> Table:
    found = Table(title=f"{len(result['faults'])} faults, {result['last_step']} steps, seed {result['seed']}")
    for name in ("fault", "times", "recovery, median s", "longest s", "steps done again, median"):
        found.add_column(name, justify="left" if name == "fault" else "right")
    for kind, times in Counter(x["fault"] for x in result["faults"]).items():
        mine = [x for x in result["faults"] if x["fault"] == kind]
        seconds, steps = [x["seconds"] for x in mine], [x["steps"] for x in mine]
        shown = [f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"] if any(seconds) else ["-", "-"]
        found.add_row(kind, str(times), *shown, f"{statistics.median(steps):.0f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), kinds(args.faults, args.seed), args.seed)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table(result))
    late = [x for x in result["faults"] if x["seconds"] > LIMIT]
    console.print(
        f"{len(result['different'])} differences from the run that nothing happened to; {len(late)} recoveries over "
        f"{LIMIT:.0f} s; {sum(x['steps'] for x in result['faults'])} of {result['steps_done']} steps done again; "
        f"{result['seconds'] / 60:.1f} minutes"
    )
    (HERE / "results/chaos.json").write_text(json.dumps(surroundings() | result, indent=1) + "\n")
    return int(bool(result["different"] or late))


if __name__ == "__main__":
    sys.exit(main())
