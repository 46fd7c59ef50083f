"""python -m benchmarks.checkpoint.checkpoint   what saving and loading cost, beside fio, torch DCP and DeepSpeed.

A state of 1 GB on two ranks. Rounds are interleaved; every figure is a median over them. Files are new at every save,
also fio's. Loads begin with an empty page cache (it is dropped where that is allowed), and read into the memory of the
state that is there. Under ten minutes and 8 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.common.processes import HERE, BenchmarkError, free_port, program
from benchmarks.common.turns import Ranks

WORLD, WIDTH, LAYERS = 2, 2048, 20
NBYTES = 3 * 4 * LAYERS * WIDTH * WIDTH
OURS = "ZeroFn"
PEERS = ("torch DCP", "DeepSpeed")
ANOTHER_SIZE = {  # what a restart with another number of ranks needs
    OURS: "nothing",
    "torch DCP": "nothing",
    "DeepSpeed": "ds_to_universal.py, and load_universal",
}
LIMITS = {"blocked": 1.5, "in flight": 1.10, "rate": 1 / 0.90, "memory": 16 << 20}


def fio(folder: Path, work: str) -> float:
    """Seconds to write or read as much as the state, as two processes of fio do with four transfers each."""
    if work == "write":
        for file in folder.glob("fio.*"):
            file.unlink()
    command = ["fio", "--name=fio", f"--directory={folder}", f"--size={NBYTES // WORLD}", f"--rw={work}", "--direct=1"]
    command += ["--bs=1M", "--iodepth=4", f"--numjobs={WORLD}", "--ioengine=libaio", "--end_fsync=1"]
    done = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True, check=True)
    return max(job[work]["runtime"] for job in json.loads(done.stdout)["jobs"]) / 1e3


def drop_caches() -> bool:
    """Whether the page cache could be emptied."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


class Rounds:
    """The figures of all rounds: `found[system][figure]`, a number a round."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self._console = folder, console
        self.found: dict[str, dict[str, list[float]]] = {}
        self.dropped = True

    def note(self, system: str, **figures: float) -> None:
        for name, value in figures.items():
            self.found.setdefault(system, {}).setdefault(name, []).append(value)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self._console.print(f"{system}: {shown}", highlight=False)

    def fio(self) -> None:
        written = fio(self.folder, "write")
        self.dropped &= drop_caches()
        self.note("fio", save=written, load=fio(self.folder, "read"))

    def system(self, name: str, ranks: Ranks) -> None:
        ranks.ask("clear")
        copied = max(x["seconds"] for x in ranks.ask("memcpy"))
        saved = ranks.ask("save")
        self.dropped &= drop_caches()
        loaded = ranks.ask("load")
        ranks.ask("clear")
        alone = [s for x in ranks.ask("steps", options={"count": 6}) for s in x["steps"]]
        behind = ranks.ask("behind")
        meanwhile = [s for x in behind for s in x["steps"]]
        self.note(
            name,
            save=max(x["seconds"] for x in saved),
            load=max(x["seconds"] for x in loaded),
            save_memory=max(x["memory"] for x in saved),
            load_memory=max(x["memory"] for x in loaded),
            memcpy=copied,
            blocked=max(x["blocked"] for x in behind),
            behind=max(x["seconds"] for x in behind),
            **({"in_flight": statistics.median(meanwhile) / statistics.median(alone)} if meanwhile else {}),
        )

    def middle(self, system: str, figure: str) -> float:
        return statistics.median(self.found[system][figure])


def start(name: str, python: str, folder: Path) -> Ranks:
    port, command = str(free_port()), program(python, "benchmarks.checkpoint.worker")
    sizes = [str(folder / name.replace(" ", "-")), str(WIDTH), str(LAYERS)]
    return Ranks(name, [[*command, name, str(rank), str(WORLD), port, *sizes] for rank in range(WORLD)])


def run(options: argparse.Namespace, folder: Path, console: Console) -> tuple[Rounds, dict[str, str]]:
    """All rounds, and what was left out and why. The first save of each system is not counted."""
    rounds, left_out, ranks = Rounds(folder, console), dict[str, str](), dict[str, Ranks]()
    try:
        for name in (OURS, *PEERS):
            python = sys.executable if name != "DeepSpeed" else options.peers_python
            try:
                ranks[name] = start(name, python, folder)
                ranks[name].ask("behind")
            except (BenchmarkError, OSError) as error:
                left_out[name] = str(error)
                console.print(f"{name} is left out: {str(error)[:300]}", highlight=False)
                if name in ranks:
                    ranks.pop(name).close()
        for number in range(options.rounds):
            turns: list[tuple[str, Callable[[], None]]] = [("fio", rounds.fio)]
            turns += [(name, lambda name=name: rounds.system(name, ranks[name])) for name in ranks]  # type: ignore[misc]
            for _, turn in turns[:: 1 if number % 2 == 0 else -1]:
                drop_caches()  # what the one before has left to write
                turn()
    finally:
        for each in ranks.values():
            each.close()
    return rounds, left_out


def table(rounds: Rounds) -> Table:
    found = Table(
        title=f"A state of {NBYTES / 1e9:.2f} GB on {WORLD} ranks",
        caption="medians over rounds; memory: the peak above what was there before; steps: those that begin and end "
        "while a save is in flight",
    )
    names = ["system", "save s", "load s", "save, load MB", "blocked ms", "x memcpy", "complete s", "steps"]
    for name in (*names, "another number of ranks"):
        found.add_column(name, justify="right" if name != "system" else "left")
    for name in rounds.found:
        row = [f"{rounds.middle(name, figure):.2f}" for figure in ("save", "load")]
        if name != "fio":
            memory = [f"{rounds.middle(name, f'{x}_memory') / 1e6:.0f}" for x in ("save", "load")]
            blocked, copied = rounds.middle(name, "blocked"), rounds.middle(name, "memcpy")
            row += [", ".join(memory), f"{1e3 * blocked:.0f}", f"{blocked / copied:.2f}"]
            row.append(f"{rounds.middle(name, 'behind'):.2f}")
            row.append(f"{rounds.middle(name, 'in_flight'):.2f}" if "in_flight" in rounds.found[name] else "-")
            row.append(ANOTHER_SIZE[name])
        found.add_row(name, *row)
    return found


def checks(rounds: Rounds) -> list[Check]:
    middle = rounds.middle
    out = []
    for work in ("save", "load"):
        ratio = middle(OURS, work) / middle("fio", work)
        out.append(Check(f"{work} beside fio", f"{100 / ratio:.0f} % of its rate", ratio, LIMITS["rate"]))
        memory = middle(OURS, f"{work}_memory")
        out.append(Check(f"memory of a {work}, beyond the state", f"{memory / 1e6:.1f} MB", memory, LIMITS["memory"]))
    blocked = middle(OURS, "blocked") / middle(OURS, "memcpy")
    out.append(Check("blocked by a save behind steps, x memcpy", f"{blocked:.2f}", blocked, LIMITS["blocked"]))
    steps = middle(OURS, "in_flight")
    return [*out, Check("steps while a save is in flight", f"{steps:.2f}", steps, LIMITS["in flight"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the drive to measure; the system's temporary folder by default")
    parser.add_argument("--peers-python", default=str(HERE.parent / ".venv-peers/bin/python"))
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    if shutil.which("fio") is None:
        raise SystemExit("fio is not there; apt-get install fio")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rounds, left_out = run(options, Path(folder), console)
    console.print(table(rounds))
    if not rounds.dropped:
        console.print("The page cache could not be emptied: DCP's and DeepSpeed's loads are from memory.")
    found = checks(rounds)
    for check in found:
        console.print(f"{'kept' if check.kept else 'NOT KEPT':<9} {check.what}: {check.shown}", highlight=False)
    result: dict[str, Any] = {"rounds": rounds.found, "left_out": left_out, "bytes": NBYTES, "world": WORLD}
    (HERE / "results/checkpoint.json").write_text(json.dumps(report.surroundings() | result, indent=1) + "\n")
    return int(not all(check.kept for check in found))


if __name__ == "__main__":
    sys.exit(main())
