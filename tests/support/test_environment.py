"""Which code and which libraries the tests run with: what `tests/conftest.py` refuses, and what it leaves out."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest

ROOT = Path(__file__).resolve().parents[2]
# As an editable install has it: its finder comes before PYTHONPATH and the current folder.
EDITABLE = """
import importlib.util, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "zerofn":
            return importlib.util.spec_from_file_location(name, {package!r})

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.slow
def test_an_editable_install_of_another_clone_is_refused(tmp_path):
    package = tmp_path / "other/zerofn/__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    (tmp_path / "sitecustomize.py").write_text(EDITABLE.format(package=str(package)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/support/test_same.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert f"imports zerofn from {package.parent}, but these tests are for {ROOT / 'zerofn'}" in done.stderr


def reported(error):
    """Return what becomes of the report of a file with an error."""
    hook = conftest.pytest_make_collect_report(SimpleNamespace(path=Path("test_x.py")))
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(SimpleNamespace(outcome="failed", longrepr=error))
    return end.value.value


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("E   ModuleNotFoundError: No module named 'transformers.models'", "skipped"),
        ("E   ModuleNotFoundError: No module named 'zerofn.missing'", "failed"),
        ("E   NameError: name 'transformers' is not defined", "failed"),
    ],
)
def test_a_file_whose_library_is_not_installed_is_left_out(monkeypatch, error, outcome):
    monkeypatch.delenv("ZEROFN_ALL_TESTS", raising=False)
    report = reported(error)
    assert report.outcome == outcome
    if outcome == "skipped":
        assert report.longrepr == ("test_x.py", 0, "needs transformers: pip install -e '.[test]' brings it")


def test_in_the_environment_of_all_tests_a_missing_library_is_an_error(monkeypatch):
    monkeypatch.setenv("ZEROFN_ALL_TESTS", "1")
    assert reported("E   ModuleNotFoundError: No module named 'transformers'").outcome == "failed"
