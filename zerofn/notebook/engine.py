"""What an engine of ipyparallel does as a rank: these functions are called there, by `pool`."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

STOP = -1  # where, behind the ranks' counts of steps, the last step stands that all of them take; 0 for none


def become_rank(environ: Mapping[str, str], counts: str) -> int:
    """Join the other ranks, and return this process's id. `counts`: a file that ranks and pool share."""
    os.environ.update(environ)
    if importlib.util.find_spec("matplotlib_inline") is not None:  # figures are shown in the notebook
        os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")

    import zerofn

    zerofn.Mesh.of(None)
    steps, rank = np.memmap(counts, np.int64, "r+"), int(environ["RANK"])

    def count() -> None:
        if 0 < steps[STOP] <= steps[rank]:
            raise KeyboardInterrupt
        steps[rank] += 1

    zerofn.register_step_pre_hook(count)
    _shell().display_pub.register_hook(_as_another_display)
    return os.getpid()


def _shell() -> Any:
    return sys.modules["IPython"].get_ipython()


def number_cells(number: int) -> None:
    """Give the next cell the number that it has in the notebook, for tracebacks."""
    shell = _shell()
    shell.execution_count = max(shell.execution_count, number)


def _as_another_display(message: dict[str, Any]) -> dict[str, Any]:
    """Send an update of something displayed as a display of the same name: clients of ipyparallel drop updates."""
    if message["header"]["msg_type"] == "update_display_data":
        message["header"]["msg_type"] = message["msg_type"] = "display_data"
    return message


def fail(message: str) -> None:
    """End what other ranks wait for of this one."""
    import zerofn

    zerofn.abort(message)


def variables() -> tuple[list[str], list[str]]:
    """Return the names of what holds `Sharded` trees, and of what else cells have made, but for modules, functions and
    classes.
    """
    shell = _shell()
    hidden = {"In", "Out", "exit", "quit", "open", *shell.user_ns_hidden}
    own = {k: v for k, v in shell.user_ns.items() if not k.startswith("_") and k not in hidden}
    states = [name for name, value in own.items() if _is_state(value)]
    others = [k for k, v in own.items() if k not in states and not isinstance(v, ModuleType | FunctionType | type)]
    return states, others


def _is_state(value: Any) -> bool:
    import zerofn

    if isinstance(value, FunctionType | ModuleType | type):
        return False
    found: list[Any] = []

    def look(x: Any) -> bool:
        if isinstance(x, zerofn.Sharded):
            found.append(x)
        return isinstance(x, zerofn.Sharded)

    zerofn.tree_map(lambda x: x, value, is_leaf=look)
    return bool(found)


def save_states(folder: str, names: Sequence[str]) -> dict[str, bytes | str]:
    """Save variables below a folder. Returns what each is, as bytes, or why it could not be saved."""
    import zerofn

    return {
        name: _said(lambda name=name: zerofn.save(Path(folder) / name, _shell().user_ns[name])) or _abstract(name)
        for name in names
    }


def _said(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _abstract(name: str) -> bytes | str:
    import zerofn

    from ..launch.payload import packed

    try:
        return packed(zerofn.abstract(_shell().user_ns[name]), name)
    except TypeError as error:
        return str(error)


def described(before: Sequence[str]) -> tuple[tuple[list[str], dict[str, bytes | str]] | None, list[str]]:
    """Return (the paths saved to, the newest last, and what the states are), and the names of all variables. The first
    is None if nothing was saved since `before`.
    """
    import zerofn

    states, others = variables()
    paths = [str(x) for x in zerofn.saved_paths()]
    saved = None if paths == list(before) else (paths, {name: _abstract(name) for name in states})
    return saved, [*states, *others]


def load_states(states: Mapping[str, bytes], paths: Sequence[str]) -> dict[str, str]:
    """Make variables again, each from the last path that has it. Returns where each was found, "" for nowhere."""
    import zerofn

    from ..launch.payload import unpacked

    found = {}
    for name, kept in states.items():
        like, found[name] = unpacked(kept), ""
        for path in reversed(paths):
            try:
                _shell().user_ns[name] = zerofn.load(path, like=like)
            except zerofn.CheckpointError:
                continue
            found[name] = path
            break
    return found
