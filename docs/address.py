"""The project's address, which its owner writes once, under `[project.urls]` in pyproject.toml.

    python -m docs.address      # after that: writes the address into README.md

README's links are relative as long as the address is empty, which is right in a clone. With an address they are
absolute, so that they also work on a package index, and the line that installs needs no clone. The site's pages then
link to the repository: mkdocs loads this file as a hook.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_INSTALL = re.compile(r'(?m)^pip install (?:\.|"zerofn @ git\+\S+")  # .*$')
_LINK = re.compile(r"(!?\[[^]]*\])\((?!#)([^)\s]+)\)")


def address(pyproject: str) -> str:
    """Return the address in the text of pyproject.toml, without a slash at its end; empty if nobody has filled it.

    >>> address('[project.urls]\\nRepository = "https://example.org/zerofn/"')
    'https://example.org/zerofn'
    >>> address('[project.urls]\\n# Repository = "https://..."')
    ''
    """
    found = re.search(r'(?m)^\[project\.urls\]\n(?:#.*\n)*Repository = "([^"]*)"', pyproject)
    return found[1].rstrip("/") if found else ""


def addressed(readme: str, where: str) -> str:
    """Return README's text with links, and the line that installs, for an address; an empty one makes them relative.

    >>> addressed("[plans](docs/plans.md)", "https://example.org/zerofn")
    '[plans](https://example.org/zerofn/blob/HEAD/docs/plans.md)'
    """
    in_clone = "pip install .  # in a clone, in an environment that has torch"
    line = f'pip install "zerofn @ git+{where}"  # in an environment that has torch' if where else in_clone

    def link(found: re.Match[str]) -> str:
        words, target = found[1], re.sub(r"^https?://.*?/(?:blob|raw)/HEAD/", "", found[2])
        if re.match(r"https?://", target):  # somebody else's page
            return found[0]
        kind = "raw" if words.startswith("!") else "blob"
        return f"{words}({f'{where}/{kind}/HEAD/' if where else ''}{target})"

    return _LINK.sub(link, _INSTALL.sub(lambda _: line, readme))


def on_config(config: Any) -> Any:
    """Give the site its link to the repository; mkdocs calls it."""
    where = address((ROOT / "pyproject.toml").read_text())
    if where:
        config["repo_url"], config["repo_name"] = where, "Repository"
    return config


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(addressed(page.read_text(), address((ROOT / "pyproject.toml").read_text())))
