"""The rooms of the library and who imports whom, as text for design.md.

python -m tests.support.architecture            # prints it
python -m tests.support.architecture design.md  # writes it where design.md has it: `make architecture`
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

from tests.support.library import FILES, ORDER, imported_modules, parse, room, room_imported

BEGIN = "<!-- architecture: written by `make architecture` -->"
END = "<!-- end of architecture -->"
PUBLIC = "__init__"  # what `import zerofn` gives: guests use nothing else, and no arrow shows it
SHOWN = {PUBLIC: "zerofn"}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Room -> the rooms that its files import, in the order of rooms; rooms that are not there yet are left out."""
    found: dict[str, set[str]] = {name: set() for name in ORDER if name in {room(module) for module in FILES}}
    for module in FILES:
        targets = {room_imported(name) for _, name in imported_modules(module, parse(module))}
        found[room(module)] |= {x for x in targets if x in found and x not in (room(module), PUBLIC)}
    return found


def reduced(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that are left when those are dropped that a way over other rooms stands for."""
    reached: dict[str, set[str]] = {}
    for name in arrows:  # in the order of rooms, so what a room imports has been seen
        reached[name] = arrows[name].union(*(reached[x] for x in arrows[name]))
    return {name: {x for x in to if not any(x in reached[y] for y in to - {x})} for name, to in arrows.items()}


def summary(name: str) -> str:
    """What a room holds: the first paragraph of its docstring, on one line."""
    module = "zerofn" if name == "__init__" else f"zerofn.{name.replace('/', '.')}"
    return " ".join((ast.get_docstring(parse(module)) or "").split("\n\n")[0].split())


def rooms() -> list[str]:
    """Rooms, those that import most first, each followed by the rooms inside it, as `room/inner`."""
    packages = {module for module, path in FILES.items() if path.name == "__init__.py" and module.count(".") == 2}
    inner = {name: sorted(m for m in packages if room(m) == name) for name in reversed(imports())}
    return [x for name in inner for x in (name, *(m.split(".", 1)[1].replace(".", "/") for m in inner[name]))]


def picture() -> str:
    """The diagram, drawn by GitHub from Mermaid, and a table of the rooms."""
    arrows = reduced(imports())
    lines = ["```mermaid", "flowchart TD"]
    for name in reversed(arrows):  # `graph` is a word of Mermaid's, `graph_` is not
        lines.append(f"    {name}_[{SHOWN.get(name, name)}]")
        lines += [f"    {name}_ --> {x}_" for x in sorted(arrows[name], key=ORDER.index)]
    lines += ["```", "", "| room | what it holds |", "|---|---|"]
    lines += [f"| `{SHOWN.get(name, name)}` | {summary(name)} |" for name in rooms()]
    return "\n".join(lines)


def between(text: str) -> str:
    """What a page holds between the two marks. Raises `ValueError` where a mark is missing."""
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def main(page: str | None = None) -> None:
    """Print the picture, or put it between the marks of a page."""
    if page is None:
        print(picture())
        return
    text = Path(page).read_text()
    between(text)
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    Path(page).write_text(f"{head}{BEGIN}\n\n{picture()}\n\n{END}{tail}")


if __name__ == "__main__":
    main(*sys.argv[1:])
