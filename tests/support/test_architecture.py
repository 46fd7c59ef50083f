import ast
import re

from tests.support import architecture
from tests.support.library import FILES, ORDER, ROOT, parse


def test_design_has_the_picture_of_today():
    assert architecture.between((ROOT / "design.md").read_text()) == architecture.picture(), "run `make architecture`"


def test_ways_over_other_rooms_are_left_out():
    arrows = {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"a"}}
    assert architecture.reduced(arrows) == {"a": set(), "b": {"a"}, "c": {"b"}, "d": {"a"}}


def test_what_is_left_reaches_what_is_imported():
    arrows, left = architecture.imports(), architecture.reduced(architecture.imports())
    reached = {}
    for name in arrows:
        reached[name] = left[name].union(*(reached[x] for x in left[name]))
    assert all(arrows[name] <= reached[name] for name in arrows)


def test_every_room_says_what_it_holds():
    shown = architecture.rooms()
    assert [name for name in shown if not architecture.summary(name)] == []
    assert [name for name in shown if name in ORDER] == list(reversed(architecture.imports()))


def docstrings_of_rooms():
    """Module -> the docstring of each folder of the library."""
    folders = [module for module, path in FILES.items() if path.name == "__init__.py" and module != "zerofn"]
    return {module: ast.get_docstring(parse(module)) or "" for module in folders}


def test_a_room_says_where_to_start_reading():
    rooms = {module: text for module, text in docstrings_of_rooms().items() if module.count(".") == 1}
    assert [module for module, text in rooms.items() if "Start reading:" not in text] == []


def test_rooms_name_files_that_are_there():
    missing = []
    for module, text in docstrings_of_rooms().items():
        for name in re.findall(r"`([\w/.-]+\.(?:py|h|cpp|cu|json|md))`", text):
            if not (FILES[module].parent / name).exists() and not (ROOT / name).exists():
                missing.append((module, name))
    assert missing == []


def test_a_page_is_written_between_the_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{architecture.BEGIN}\nyesterday\n{architecture.END}\nafter\n")
    architecture.main(str(page))
    text = page.read_text()
    assert architecture.between(text) == architecture.picture()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "yesterday" not in text
