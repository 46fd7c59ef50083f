"""Set before torch is imported, here and in the ranks: few threads, no network, no screen. And which tests are slow."""

import gc
import importlib.util
import logging
import os
import re
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# An editable install is found before PYTHONPATH, so that these tests would run the code of another clone.
FOUND = importlib.util.find_spec("zerofn")
if FOUND is not None and FOUND.origin is not None and not Path(FOUND.origin).resolve().is_relative_to(ROOT / "zerofn"):
    sys.exit(
        f"tests: {sys.executable} imports zerofn from {Path(FOUND.origin).parent}, but these tests are for "
        f"{ROOT / 'zerofn'}. That environment has another clone installed. Use an environment of this clone: "
        "`make check` makes .venv, and `pip install -e '.[dev]'` installs this clone instead of the other."
    )

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

pytest_plugins = ["tests.support.ranks", "tests.support.workers"]

gc.disable()  # while tests are collected: a fifth of that time goes into modules, of which none is garbage

# Every test here runs a program as a user does, in a process of its own.
SLOW_FOLDERS = ("examples", "benchmarks", "launch", "system")


def pytest_addoption(parser):
    parser.addoption("--one-of-each", action="store_true", help="of a test with several cases, run the first")


def pytest_configure(config):
    """Loops inside of tests have some of their cases where whole products are left out, and all if one is asked for."""
    if "not whole" in config.option.markexpr:
        os.environ["ZEROFN_FEW_CASES"] = "1"  # FEW of support/some.py: nothing of tests is imported yet


def pytest_collection_modifyitems(config, items):
    """Mark what `make check` leaves to `make test`: tests on real ranks, whole programs, and the cases of large
    products that `quick` does not name; what `make test` leaves to `make test-all`: those that `part` does not; and
    what needs programs of the system. Programs run first: they mostly wait, which other tests fill, if there are any
    left."""
    items.sort(key=lambda item: not _is_program(item))
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        if _is_program(item) or not _is_among(item, "quick"):
            item.add_marker(pytest.mark.slow)
        if item.path.is_relative_to(TESTS / "system"):
            item.add_marker(pytest.mark.system)
        if not _is_among(item, "part"):
            item.add_marker(pytest.mark.whole)
    if config.option.one_of_each:
        _keep_one_of_each(config, items)


def _keep_one_of_each(config, items):
    """Leave out all cases of a test but the first that `make check` may run."""
    seen, left_out = set(), []
    for item in items:
        if not any(map(item.get_closest_marker, ("ranks", "slow", "whole"))):
            test = item.path, item.cls, getattr(item, "originalname", item.name)
            left_out += [item] if test in seen else []
            seen.add(test)
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skip a file that needs a library of `.[test]` which is not in this environment, such as one of `.[dev]`, and say
    so. In `make check` and `make test`, which install them all, it is an error."""
    report = yield
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr or ""))
    if missing and missing[1] not in ("tests", "zerofn") and "ZEROFN_ALL_TESTS" not in os.environ:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"needs {missing[1]}: pip install -e '.[test]' brings it")
    return report


def pytest_collection_finish():
    """Collect garbage again, without what was imported: captures make much of it, beside a million objects of modules.
    And take away torch's log for traces, which pytest keeps from seeing that nobody reads it."""
    gc.freeze()
    gc.enable()
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True  # to loggers that do not, pytest adds handlers, for which torch takes a stack at each tensor


@pytest.fixture(autouse=True)
def runtime():
    """As users have it, or as `ZEROFN_RUNTIME` asks."""
    from tests.support import runtimes  # imports torch

    with runtimes.asked():
        yield


def _is_program(item):
    return any(item.path.is_relative_to(TESTS / folder) for folder in SLOW_FOLDERS)


def _is_among(item, mark):
    """Whether a test's parameters are those that one of its marks of this name, such as `quick(name=[values])`, names;
    or it has no such mark."""
    named = [x.kwargs.items() for x in item.iter_markers(mark)]
    return not named or any(all(item.callspec.params[name] in values for name, values in x) for x in named)
