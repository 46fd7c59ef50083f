"""The library's files, their rooms and what they import, read from the sources alone."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "zerofn"

# A module may import those before it and, where it is a package, its own; never those after it.
ORDER = [
    "_torch_compat",
    "util",
    "schedules",
    "ops",
    "tree",
    "random",
    "sparse",
    "dry_run",
    "tracing",
    "memory",
    "job",
    "comm",
    "deferred_init",
    "collectives",
    "offload",
    "geometry",
    "sharding",
    "sharded_math",
    "graph",
    "capture",
    "guards",
    "optim",
    "training",
    "runtime",
    "cost",
    "checkpoint",
    "runs",
    "passes",
    "parallel",
    "moe",
    "lowering",
    "planning",
    "compile",
    "interop",
    "integrations",
    "launch",
    "notebook",
    "cli",
    "__init__",
]


def library_files() -> Iterator[tuple[str, Path]]:
    """`(module name, path)` of the library's Python files; `ops/` is `zerofn.ops`."""
    for folder, package in ((LIBRARY, "zerofn"), (ROOT / "ops", "zerofn.ops")):
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).with_suffix("").parts
            if package == "zerofn" and inner[0] == "ops":
                continue  # the link to ops/, which comes by itself
            yield ".".join((package, *inner)).removesuffix(".__init__"), path


FILES = dict(library_files())


@functools.cache
def parse(module: str) -> ast.Module:
    """The syntax tree of a module of `FILES`."""
    return ast.parse(FILES[module].read_text(), str(FILES[module]))


def room(module: str) -> str:
    """The name in `ORDER` that stands for a module: `zerofn.capture.capture` is in `graph`."""
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def imported_modules(module: str, tree: ast.AST) -> list[tuple[int, str]]:
    """`(line, dotted name)` of everything imported anywhere in a file, relative names resolved."""
    found: list[tuple[int, str]] = []
    package = module.split(".")
    if FILES[module].name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found += ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
    return found


def room_imported(name: str) -> str | None:
    """The room that `import name` enters, or None outside the library."""
    first, *rest = name.split(".")
    if first != "zerofn":
        return None
    # `from zerofn import shard` takes a public name, which lives in __init__
    return rest[0] if rest and rest[0] in ORDER else "__init__"
