"""Nothing of a benchmark is renamed without it: each module can be imported, and `make bench` runs those that are."""

import importlib
import re

import pytest

from tests.support.library import ROOT

FILES = sorted(x.relative_to(ROOT) for x in (ROOT / "benchmarks").rglob("*.py"))
MODULES = [".".join(x.with_suffix("").parts).removesuffix(".__init__") for x in FILES]


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name, monkeypatch):
    monkeypatch.setattr("sys.argv", ["", "1", "2"])  # a program's own numbers
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which one of them sets
    importlib.import_module(name)


def test_make_bench_names_modules_that_are_there():
    named = re.findall(r"-m (benchmarks[.\w]+)", (ROOT / "Makefile").read_text())
    assert len(named) > 9 and set(named) <= set(MODULES)
