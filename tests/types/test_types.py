"""What type checkers, and so editors, know of a user's script."""

import json
import re
import subprocess
import sys
from pathlib import Path

import basedpyright
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("typed_script.py")
LINES = SCRIPT.read_text().splitlines()


def expected(*checkers):
    """Return {line: what is revealed there, None for an error}, as the script's comments say it."""
    found = {}
    for number, line in enumerate(LINES, 1):
        if said := re.search(r"  # (?:(\w+) )?is (.*)$", line):
            if said[1] is None or said[1] in checkers:
                found[number] = said[2]
        elif line.endswith("# refused"):
            found[number] = None
    return found


def run(*command):
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_pyright_knows_the_types_of_a_script_and_refuses_misspelt_options(tmp_path):
    config = {"include": [str(SCRIPT)], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    done = run(basedpyright.__name__, "--outputjson", "--pythonpath", sys.executable, "--project", str(tmp_path))
    found = {}
    for x in json.loads(done.stdout)["generalDiagnostics"]:
        revealed = re.fullmatch(r'Type of ".*" is "(.*)"', x["message"], re.S)
        found[x["range"]["start"]["line"] + 1] = revealed[1] if revealed else None
    assert found == expected("pyright")


@pytest.mark.slow
@pytest.mark.whole  # mypy reads all of torch first, a minute
def test_mypy_knows_the_same(tmp_path):
    done = run("mypy", "--cache-dir", str(tmp_path), "--check-untyped-defs", str(SCRIPT))
    found = {}
    for number, kind, said in re.findall(rf"^{SCRIPT.relative_to(ROOT)}:(\d+): (error|note): (.*)$", done.stdout, re.M):
        revealed = re.fullmatch(r'Revealed type is "(.*)"', said)
        if revealed or kind == "error":
            found[int(number)] = re.sub(r"\b(?:\w+\.)+(?=\w)", "", revealed[1]) if revealed else None
    assert {x: y for x, y in found.items() if "# pyright" not in LINES[x - 1]} == expected(), done.stdout
