"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.common.processes import HERE


def add_pythons(parser: argparse.ArgumentParser) -> None:
    """Which interpreters run ZeroFn, and the systems beside it."""
    parser.add_argument("--zerofn-python", default=sys.executable)
    parser.add_argument("--peers-python", default=str(HERE.parent / ".venv-peers/bin/python"))


def add_end(parser: argparse.ArgumentParser, out: str = "") -> None:
    """Where results go, by default to a file of their folder or to the folder, and whether limits count."""
    parser.add_argument("--out", type=Path, default=HERE / "results" / out)
    parser.add_argument("--check", action="store_true", help="end with 1 if a limit is missed")
