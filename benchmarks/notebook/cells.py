"""python -m benchmarks.notebook.cells   (make bench): what ranks behind a notebook cost.

How soon they are there; what a cell takes beyond the same call in a script; a step's time in a cell beside the same
training by `zerofn.run`, whose ranks are torchrun's; how soon a killed rank is told; what `zerofn.progress` takes of a
step of 100 ms. Some nine minutes.

Steps take a few percent more or less in each new process, by where its memory lies, and the first ones after a pause
take longer. So each round has new ranks behind the notebook and new ones by the launcher, and both are asked alike.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from rich.console import Console
from traitlets.config import Config

import zerofn
from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.common.options import add_end
from benchmarks.common.statistic import Ratio, interval, ratio

RANKS, STEPS, CELLS = 2, 400, 30
ASKED = 3  # times that ranks are asked for a step's time; the first does not count
CODE = """
import time, torch, zerofn
from benchmarks.common.workload import SMOKE
from benchmarks.common.zerofn_rows import Compiled

def steps(row, count):
    tokens = torch.arange(SMOKE.batch * SMOKE.seq).view(SMOKE.batch, SMOKE.seq) % SMOKE.vocab
    row(tokens)
    start = time.perf_counter()
    for _ in range(count):
        row(tokens)
    return 1e3 * (time.perf_counter() - start) / count

torch.set_num_threads(1)
row = Compiled(SMOKE, 3)
"""


def script() -> float:
    """Milliseconds a step, by ranks of their own."""
    space: dict[str, Any] = {}
    exec(CODE, space)
    return statistics.median([space["steps"](space["row"], STEPS) for _ in range(ASKED)][1:])


class Notebook:
    """A shell with ranks."""

    def __init__(self) -> None:
        config = Config()
        config.HistoryManager.enabled = False
        self.shell = InteractiveShell.instance(config=config)
        self.run("%load_ext zerofn")

    def run(self, cell: str) -> str:
        """Run a cell; what it prints."""
        with capture_output() as out:
            self.shell.run_cell(cell).raise_error()
        return str(out.stdout)

    def pids(self) -> list[int]:
        """Of the ranks."""
        found: list[int] = self.shell.magics_manager.registry["RankMagics"].pool.pids
        return found


def seconds(work: Any) -> float:
    """What a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cell_overheads(notebook: Notebook) -> list[float]:
    """Seconds of a cell that does next to nothing, with the same call here taken off."""
    notebook.run("%%ranks\nx = 1")
    return [seconds(lambda: notebook.run("%%ranks\nx = 1")) for _ in range(CELLS)]


def steps_in_cells(notebook: Notebook) -> float:
    """Milliseconds a step, by new ranks behind a notebook."""
    notebook.run(f"%ranks stop\n%ranks {RANKS}")
    notebook.run("%%ranks\n" + CODE)
    found = [notebook.run(f"%%ranks\nprint(steps(row, {STEPS}))").splitlines()[0] for _ in range(ASKED)]
    return statistics.median(map(float, found[1:]))


def told_after(notebook: Notebook) -> float:
    """Seconds from the kill of a rank in the midst of a cell to the cell's error."""
    killed: list[float] = []

    def kill() -> None:
        time.sleep(1.0)
        killed.append(time.perf_counter())
        os.kill(notebook.pids()[1], signal.SIGKILL)

    threading.Thread(target=kill).start()
    try:
        notebook.run("%%ranks\nfor _ in range(10**6): steps(row, 1)")
    except RuntimeError:
        return time.perf_counter() - killed[0]
    raise RuntimeError("the cell went on without a rank")


def progress_share() -> Ratio:
    """The time of a loop of 100 ms a turn with `zerofn.progress` over the one without."""

    def loop(loader: Any) -> float:
        def turns() -> None:
            for k in loader:
                end = time.perf_counter() + 0.1
                while time.perf_counter() < end:
                    pass
                if hasattr(loader, "log"):
                    loader.log({"loss": float(k)})

        return seconds(turns)

    pairs = [(loop(zerofn.progress(range(20), every=10)), loop(range(20))) for _ in range(5)]
    return ratio([a for a, _ in pairs], [b for _, b in pairs])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    add_end(parser, "notebook.json")
    options = parser.parse_args()
    notebook = Notebook()
    ready = []
    for _ in range(3):
        notebook.run("%ranks stop")
        ready.append(seconds(lambda: notebook.run(f"%ranks {RANKS}")))
    overhead = cell_overheads(notebook)
    here, there = [], []
    for _ in range(options.rounds):
        here.append(steps_in_cells(notebook))
        there.append(zerofn.run(script, ranks=RANKS))
    told = told_after(notebook)
    notebook.run("%ranks stop")
    steps, cell, share = ratio(here, there), interval([1e3 * x for x in overhead]), progress_share()
    start = interval(ready)
    held = [
        Check(f"{RANKS} ranks are ready, s", str(start), start.median, 10.0),
        Check("a cell beyond the same call, ms", str(cell), cell.median, 50.0),
        Check("ms/step: in a cell / by a launcher", str(steps), steps.median, 1.03),
        Check("a killed rank is told, s", f"{told:.1f}", told, 10.0),
        Check("a loop of 100 ms a turn: with progress / without", str(share), share.median, 1.01),
    ]
    Console().print(report.check_table(held))
    run = {"surroundings": report.surroundings(), "ms_in_a_cell": here, "ms_by_a_launcher": there, "cell_s": overhead}
    return report.conclude(options.out, run, held, options.check)


if __name__ == "__main__":
    sys.exit(main())
