"""Examples run as a user runs them: a process of its own, under plain python or under torchrun. Or, in a tenth of the
time, in a process that has imported what they do: here, or on ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, *options: object, folder: Path, num_ranks: int = 0, timeout: float = 240) -> str:
    """What `examples/<name>` prints when run in `folder`; `num_ranks` 0 is plain python."""
    launch = [] if not num_ranks else [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)
    ]  # fmt: skip
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "COLUMNS": "160",  # lines are not wrapped
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *launch, str(ROOT / "examples" / name), *map(str, options)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def run_here(name: str, *options: object, folder: Path) -> str:
    """What `run` returns, of the program as this process runs it; on ranks each has its own call."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "160")  # lines are not wrapped
        patch.setattr(sys, "argv", [name, *map(str, options)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return printed.getvalue()


def module(name: str) -> ModuleType:
    """`examples/<name>.py`, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
