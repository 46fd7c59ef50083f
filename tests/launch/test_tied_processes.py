"""Processes that end when the one that started them is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module that leaves its number, that of a process it forks, and its arguments, and goes on.
LASTS = """
import os, sys, time
from pathlib import Path
child = os.fork()
Path(sys.argv[1], f"pid-{os.getpid()}").write_text(f"{__name__} {sys.argv[2:]}")
time.sleep(60)
"""
# What starts it, from a thread that ends at once.
STARTS = """
import os, subprocess, sys, threading, time
os.mkdir(sys.argv[1])
command = [sys.executable, "-m", "zerofn.launch.tied_processes"]
command += [str(os.getpid()), sys.argv[1], "lasts", sys.argv[2], "a"]
thread = threading.Thread(target=subprocess.Popen, args=(command,), kwargs={"start_new_session": True})
thread.start()
thread.join()
time.sleep(60)
"""
RUNS = """
import os, sys, time, zerofn
from pathlib import Path
def lasts(folder):
    Path(folder, f"pid-{os.getpid()}").touch()
    time.sleep(60)
zerofn.run(lasts, sys.argv[2], ranks=2)
"""
POOL = """
import sys, time
from pathlib import Path
from zerofn.notebook.pool import Pool
pool = Pool(1)
for pid in (*pool.pids, pool._cluster.controller.pid):
    Path(sys.argv[2], f"pid-{pid}").touch()
time.sleep(60)
"""


def lives(pid):
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def killed(program, tmp_path, number):
    """Kill a program once `number` processes have left theirs, and return the names of what they left."""
    tmp, left = tmp_path / "tmp", tmp_path / "left"
    for folder in (tmp, left):
        folder.mkdir()
    (tmp_path / "lasts.py").write_text(LASTS)
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "TMPDIR": str(tmp)}
    command = [sys.executable, "-c", program, str(tmp / "of the program"), str(left)]
    with subprocess.Popen(command, env=environ, start_new_session=True) as process:
        end = time.monotonic() + 60
        while len(list(left.iterdir())) < number and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.05)
        pids = [int(x.name[4:]) for x in left.iterdir()]
        process.send_signal(signal.SIGKILL)
    assert len(pids) == number
    end = time.monotonic() + 5
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert [pid for pid in pids if lives(pid)] == []
    while any(tmp.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    assert list(tmp.iterdir()) == []
    return [x.read_text() for x in left.iterdir()]


def test_a_module_ends_with_the_process_that_started_it_and_not_with_its_thread(tmp_path):
    assert killed(STARTS, tmp_path, 2) == ["__main__ ['a']"] * 2


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "number"), [(RUNS, 2), pytest.param(POOL, 2, marks=pytest.mark.whole)], ids=["zerofn.run", "%ranks"]
)
def test_ranks_end_with_what_started_them(tmp_path, program, number):
    killed(program, tmp_path, number)
