"""Tests of small files in workers, as a program of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "pytest.ini": "[pytest]\n",
    "conftest.py": """
import os, pytest

@pytest.fixture(scope="session")
def once():
    print("set up in", os.getpid(), file=open("log", "a"))
    yield
    print("torn down in", os.getpid(), file=open("log", "a"))
""",
    "test_a.py": """
import os, time, warnings

def test_passes(once, tmp_path):
    print(tmp_path, file=open("folders", "a"))
    time.sleep(0.2)  # so that the other worker takes a file

def test_warns(once):
    warnings.warn("mind the gap")

def test_fails(capfd):
    os.system("echo heard")
    assert capfd.readouterr().out == "heard\\n"
    os.system("expr 40 + 2")
    assert 1 + 1 == 3
""",
    "test_b.py": """
import os, pytest, signal

def test_passes(once, tmp_path):
    print(tmp_path, file=open("folders", "a"))

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_goes_on():
    pass

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass
""",
    "test_c.py": """
import pytest, threading

def test_a_session_goes_on(once):
    pass

@pytest.mark.timeout(1)
def test_hangs():
    threading.Event().wait()
""",
}


@pytest.fixture
def run(tmp_path):
    """What pytest prints, and its exit code, of `FILES`."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def of(*options):
        command = [sys.executable, "-m", "pytest", "-p", "tests.support.workers", "-ra", "--workers=2", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    return of


def test_tests_end_in_every_way(run):
    code, printed = run("-p", "pytest_timeout")
    assert code == 1
    for line in (
        "3 failed, 5 passed, 1 skipped, 1 warning in ",
        "FAILED test_a.py::test_fails - assert (1 + 1) == 3",
        "FAILED test_b.py::test_dies - the process of this test ended with exit code -9",
        "FAILED test_c.py::test_hangs - Failed: Timeout",
        "SKIPPED [1] test_b.py",
        "UserWarning: mind the gap",
        "Captured stdout call -----------------------------\n42\n",
    ):
        assert line in printed, printed


def test_each_worker_has_its_session_and_folders(run, tmp_path):
    run("--deselect=test_b.py::test_dies", "--deselect=test_c.py::test_hangs")
    log = (tmp_path / "log").read_text().splitlines()
    pids = {line.split()[-1] for line in log}
    assert len(pids) == 2
    assert sorted(log) == sorted(f"{what} in {pid}" for pid in pids for what in ("set up", "torn down"))
    folders = (tmp_path / "folders").read_text().split()
    assert len(set(folders)) == 2 and not any(Path(x).exists() for x in folders)


def test_the_first_failure_is_the_last(run):
    code, printed = run("-x", "test_a.py")
    assert code == 1 and "stopping after 1 failures" in printed and "1 failed, 2 passed" in printed
