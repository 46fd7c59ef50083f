"""Assemble the site's pages in `build/docs`, and run every Python block and notebook in them.

    python -m docs.assemble [PAGE ...]      # all pages, or some, by their paths in docs/
    mkdocs build --strict -f docs/mkdocs.yml

A block that begins with three backticks and `python` is run, all of a page in order in one process; a block of `py` is
somebody else's code, and is only shown. Notebooks run on the ranks that their own cells start.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from docs import reference
from tests.support import architecture
from tests.support.library import FILES

ROOT = Path(__file__).resolve().parent.parent
HERE, OUT = ROOT / "docs", ROOT / "build/docs"
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
RECIPES = sorted((ROOT / "examples/recipes").glob("*.py"))
_LINK = r"(?<!!)\[([^]]+)\]\((?!http|#)[^)]*\)"  # to a file that is no page


def blocks(text: str) -> list[str]:
    """Return the Python blocks of a page that are to be run."""
    return [m.group(1) for m in re.finditer(r"^```python[^\n]*\n(.*?)^```", text, re.M | re.S)]


def run_page(path: Path) -> str:
    """Run the blocks of a page; return what was printed if they failed, else an empty text."""
    code = "\n".join(f"# block {k + 1}\n{block}" for k, block in enumerate(blocks(path.read_text())))
    if not code:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{path.stem}_page.py"
        script.write_text(code)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
        done = subprocess.run(
            [sys.executable, str(script)], cwd=folder, env=environment, text=True, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        for picture in Path(folder).glob("*.png"):
            shutil.copy(picture, OUT / picture.name)
    return "" if done.returncode == 0 else f"{path.relative_to(OUT)}:\n{done.stdout}"


def run_notebook(path: Path) -> None:
    """Run a notebook in a folder of its own, and write it as a page with its outputs and pictures."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import MarkdownExporter

    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(book, timeout=300, resources=where, coalesce_streams=True).execute()
    text, resources = MarkdownExporter().from_notebook_node(book)
    target = OUT / "notebooks"
    target.mkdir(exist_ok=True)
    for name, data in resources["outputs"].items():
        (target / f"{path.stem}_{name}").write_bytes(data)
        text = text.replace(f"({name})", f"({path.stem}_{name})")
    (target / f"{path.stem}.md").write_text(re.sub(r"\x1b\[[0-9;]*m", "", text))


def generate() -> None:
    """Write the pages that are made of other files."""
    for picture in (ROOT / "benchmarks/results").glob("*.png"):
        shutil.copy(picture, OUT / picture.name)
    design = (ROOT / "design.md").read_text()
    (OUT / "design.md").write_text(re.sub(_LINK, r"\1", design).replace("```python", "```py"))
    (OUT / "rooms.md").write_text(rooms())
    parts = [
        "# Recipes\n\nEach is one file that runs under `python` and under `torchrun`. The data are in `digits.py`.\n"
    ]
    for path in RECIPES:
        first = path.read_text().split('"""')[1].split("\n\n")[0]
        parts.append(f"## `{path.name}`\n\n{first}\n\n```py\n{path.read_text().rstrip()}\n```\n")
    (OUT / "recipes.md").write_text("\n".join(parts))
    for name, text in reference.pages().items():
        (OUT / name).write_text(text)


def rooms() -> str:
    """Return the page of the library's rooms, each with the docstring of its folder."""
    parts = [
        "# The rooms\n\nThe folders of `zerofn/`, those that import most first. Each is its `__init__` docstring.\n"
    ]
    for name in architecture.rooms():
        path = FILES[f"zerofn.{name.replace('/', '.')}"] if name != "__init__" else None
        if path is not None and path.name == "__init__.py":
            parts.append(f"## `{name}`\n\n{ast.get_docstring(ast.parse(path.read_text()))}\n")
    return "\n".join(parts)


def main() -> int:
    """Assemble and run; return the number of pages that failed."""
    chosen = [OUT / name for name in sys.argv[1:]]
    if not chosen:
        shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(HERE, OUT, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "*.yml", "__pycache__"))
    generate()
    pages = chosen or sorted(OUT.rglob("*.md"))
    begin, failed = time.time(), 0
    with ThreadPoolExecutor(2) as pool:
        for said in pool.map(run_page, pages):
            failed += bool(said)
            print(said, end="")
    if not chosen:
        for path in NOTEBOOKS:
            run_notebook(path)
    count = sum(len(blocks(p.read_text())) for p in pages)
    print(f"{count} blocks, {0 if chosen else len(NOTEBOOKS)} notebooks, {failed} failed, {time.time() - begin:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
