"""`%load_ext zerofn`: %ranks, %%ranks and %autoranks, ranks behind the cells of a notebook."""

from __future__ import annotations

import atexit
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class, no_var_expand

if TYPE_CHECKING:
    from .pool import Pool

_HELP = (
    "write %ranks N to start N ranks, %ranks restart, %ranks stop, %ranks output R for the output of rank R in the "
    "last cell, and %ranks alone for the state of the ranks"
)


@magics_class
class RankMagics(Magics):
    """The magics of one notebook, and its ranks.

    `%ranks N` starts N ranks, processes of this machine that share one process group. `%%ranks` runs a cell on all of
    them, and `%autoranks` every cell that follows. Without `%ranks`, `%%ranks` cells run in the notebook's own process.
    """

    pool: Pool | None = None
    every_cell = False
    said = False  # that a cell for ranks runs without them

    @classmethod
    def load(cls, shell: Any) -> None:
        """Register the magics with a shell, once."""
        if cls.__name__ in shell.magics_manager.registry:
            return
        magics = cls(shell)
        shell.register_magics(magics)
        shell.input_transformers_cleanup.append(magics.route)
        shell.events.register("pre_run_cell", magics.say_where)
        atexit.register(magics.stop_at_exit, os.getpid())

    def route(self, lines: list[str]) -> list[str]:
        """Send every cell to the ranks after %autoranks; without ranks, run cells for them here, as they are."""
        at = next((k for k, x in enumerate(lines) if x.strip()), None)
        if at is None:
            return lines
        first = lines[at]
        if first.split()[0] == "%%ranks" and self.pool is None:
            return lines[at + 1 :]
        if self.every_cell and self.pool is not None and not first.startswith(("%%", "%ranks", "%autoranks")):
            return ["%%ranks\n", *lines]
        return lines

    def say_where(self, cell: Any) -> None:
        """Say of the first cell for ranks that it runs here, if there are none."""
        if (cell.raw_cell or "").split()[:1] == ["%%ranks"]:
            self._say_here()

    def _say_here(self) -> None:
        if self.pool is None and not self.said:
            self.said = True
            print("There are no ranks, so %%ranks cells run in the notebook's own process. %ranks 2 starts two ranks.")

    @no_var_expand
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> None:
        """%ranks N: start N ranks, or continue with N; %%ranks: run a cell on all of them. See also %ranks help."""
        words = line.split()
        if cell is not None:
            self._run(line, cell)
        elif not words:
            print(self._state())
        elif words == ["stop"]:
            self.stop()
        elif words == ["restart"]:
            self._restart()
        elif len(words) == 2 and words[0] == "output" and words[1].isdecimal():
            self._output(int(words[1]))
        elif len(words) == 1 and words[0].lstrip("-").isdecimal():
            self._resize(int(words[0]))
        else:
            raise UsageError(f"%ranks {line}: {_HELP}.")

    @line_magic
    def autoranks(self, line: str) -> None:
        """%autoranks: run every cell that follows on the ranks; once more: in the notebook itself again."""
        if line.split() not in ([], ["on"], ["off"]):
            raise UsageError("%autoranks: write %autoranks, %autoranks on or %autoranks off.")
        self.every_cell = not self.every_cell if not line.split() else line.split() == ["on"]
        if self.every_cell and self.pool is None:
            print("There are no ranks, so cells run in the notebook's own process until %ranks N starts some.")
        else:
            print("Cells run on the ranks." if self.every_cell else "Cells run in the notebook's own process.")

    def stop(self) -> None:
        """End the ranks, if there are any."""
        pool, self.pool, self.said = self.pool, None, False
        if pool is not None:
            pool.stop()

    def stop_at_exit(self, pid: int) -> None:
        """End the ranks as the process `pid` ends, and not as one that was forked from it does."""
        if os.getpid() == pid:
            self.stop()

    def _run(self, line: str, cell: str) -> None:
        if line.strip():
            raise UsageError(f"%%ranks {line}: %%ranks takes no options. The cell's code begins on the next line.")
        if self.pool is None:  # called from code, which `route` has not seen
            self._say_here()
            get_ipython().run_cell(cell).raise_error()
            return
        self.pool.run(cell)

    def _state(self) -> str:
        if self.pool is None:
            return f"No ranks: %%ranks cells run in the notebook's own process. To change that, {_HELP}."
        return self.pool.state()

    def _output(self, rank: int) -> None:
        pool = self.pool
        if pool is None or not rank < pool.size:
            raise UsageError(
                f"%ranks output {rank}: {'no ranks run' if pool is None else f'only {pool.size} ranks run'}."
            )
        pool.show(rank)

    def _resize(self, size: int) -> None:
        pool = self.pool
        if pool is None:
            self._start(size)
            return
        from .pool import check_size

        check_size(size)
        with tempfile.TemporaryDirectory(prefix="zerofn-ranks-") as folder:
            self._go_on(size, pool.give(folder), "Moved")

    def _restart(self) -> None:
        pool = self.pool
        if pool is None:
            raise UsageError("%ranks restart: no ranks run. Write %ranks N.")
        self._go_on(pool.size, pool.last_saves(), "Loaded from the last checkpoint")

    def _go_on(self, size: int, given: tuple[Sequence[str], Mapping[str, bytes], Sequence[str]], how: str) -> None:
        """Start other ranks with the states of these. `given`: see `Pool.give`; `how`: how states came, for people."""
        paths, states, lost = given
        self.stop()
        pool = self._start(size)
        found = pool.take(paths, states)
        kept = [name for name, path in found.items() if path]
        lost = [*lost, *(f"{name} (in no checkpoint)" for name, path in found.items() if not path)]
        if kept:
            print(f"{how}: {', '.join(kept)}.")
        everything = [*lost, "all imports, functions and classes"]
        print(f"Lost: {', '.join(everything[:-1])}{', and ' * bool(lost)}{everything[-1]}. Run their cells again.")

    def _start(self, size: int) -> Pool:
        if importlib.util.find_spec("ipyparallel") is None:
            raise UsageError("%ranks needs ipyparallel. Type pip install 'zerofn[notebook]'.")
        from .cells import Status
        from .pool import Pool, check_machine, check_size

        check_size(size)
        check_machine()
        status, ranks = Status(), f"{size} rank{'s' if size > 1 else ''}"
        self.pool = pool = Pool(size, lambda text: status.tell(f"Starting {ranks}: {text}"))
        status.end(f"{ranks} ready after {status.seconds:.1f} s. %%ranks runs a cell on all of them.")
        return pool
