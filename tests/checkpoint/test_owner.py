"""Two jobs that save to one path: one at a time, the dead are told from the living, and nobody replaces unknowingly."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import zerofn
from tests.support.checkpoint_states import train_state
from tests.support.library import ROOT
from tests.support.same import first_difference
from zerofn.checkpoint import CheckpointError, folder, owner
from zerofn.util.process import instead, the

pytestmark = pytest.mark.slow  # programs in processes of their own

OTHER = """
import sys, time, torch, zerofn
from pathlib import Path
from zerofn.checkpoint import owner, saving

path, seconds = Path(sys.argv[1]), float(sys.argv[2])
check = owner.check_still
owner.check_still = lambda *args: (print("saving", flush=True), time.sleep(seconds), check(*args))
for k in range(int(sys.argv[3])):
    zerofn.save(path, {"w": torch.full((3,), float(k))})
print("done", flush=True)
"""


@pytest.fixture
def other():
    """Start other processes that save to a path, and take so long in the middle of it."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def start(path: Path, seconds: float = 0.0, saves: int = 1) -> subprocess.Popen:
        command = [sys.executable, "-c", OTHER, str(path), str(seconds), str(saves)]
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "saving\n"
        return process

    started = []
    yield start
    for process in started:  # also of a test that failed: pipes left open are another test's warning
        process.kill()
        process.communicate()


def is_there(path: Path, seed: int) -> bool:
    return not first_difference(zerofn.load(path, like=train_state(1)), train_state(seed))


def test_another_save_is_waited_for(tmp_path, other):
    process = other(tmp_path / "a", seconds=1.0)
    zerofn.save(tmp_path / "a", train_state(7))
    assert process.communicate(timeout=30)[0] == "done\n"
    assert is_there(tmp_path / "a", 7) and len(list((tmp_path / "a").iterdir())) == 2


@pytest.mark.whole  # test_locations.py has a silent one that is taken for dead
def test_a_dead_one_is_not(tmp_path, other):
    process = other(tmp_path / "a", seconds=60.0)
    process.kill()
    process.communicate()
    start = time.monotonic()
    zerofn.save(tmp_path / "a", train_state(7))
    assert time.monotonic() - start < 2.0
    assert is_there(tmp_path / "a", 7) and len(list((tmp_path / "a").iterdir())) == 2


@pytest.mark.whole
def test_a_frozen_one_is_waited_for_a_while_and_told_when_it_wakes(tmp_path, other, monkeypatch):
    monkeypatch.setattr(owner, "SILENCE", 2.5)
    process = other(tmp_path / "a", seconds=1.0)
    process.send_signal(signal.SIGSTOP)
    zerofn.save(tmp_path / "a", train_state(7))
    process.send_signal(signal.SIGCONT)
    told = process.communicate(timeout=30)[1]
    assert "now saves to" in told and process.returncode == 1
    assert is_there(tmp_path / "a", 7) and len(list((tmp_path / "a").iterdir())) == 2


@pytest.mark.whole
def test_one_that_never_ends(tmp_path, other, monkeypatch, caplog):
    monkeypatch.setattr(owner, "PATIENCE", 1.0)
    monkeypatch.setattr(owner, "_FIRST_WORD", 0.2)
    process = other(tmp_path / "a", seconds=60.0)
    words = rf"another job \(process {process.pid} on .*\) has been saving to"
    with pytest.raises(CheckpointError, match=words):
        zerofn.save(tmp_path / "a", train_state(7))
    process.kill()
    process.communicate()
    assert any("waiting for another job" in x.getMessage() for x in caplog.records)


def test_the_older_job_is_told(tmp_path):
    path = tmp_path / "a"
    zerofn.save(path, train_state(7))
    zerofn.save(path, train_state(8))
    with instead(owner.ThisProcess()):  # a restart, say
        zerofn.save(path, train_state(9))
        zerofn.save(path, train_state(10))
    with pytest.raises(CheckpointError, match="but another job .* has saved there since"):
        zerofn.save(path, train_state(7))
    assert is_there(path, 10) and len(list(path.iterdir())) == 2
    zerofn.save(tmp_path / "b", train_state(7))


@pytest.mark.whole
def test_many_saves_of_two_jobs(tmp_path, other):
    """They are told, or wait for each other; there is always one whole checkpoint."""
    path = tmp_path / "a"
    process, told, mine = other(path, seconds=0.01, saves=30), 0, {"w": train_state(7).params["h.0.b"]}
    while process.poll() is None and told < 5:
        try:
            zerofn.save(path, mine)
        except CheckpointError as error:
            assert "but another job" in str(error)
            told += 1
            the(owner.ThisProcess).saved.clear()  # as a job that is started again
        assert folder.is_complete(path)
    theirs = process.communicate(timeout=30)[1]
    assert process.returncode == 0 or "but another job" in theirs, theirs
    assert len(list(path.iterdir())) == 2


@pytest.mark.whole
def test_a_load_while_another_job_saves(tmp_path):
    """It reads one checkpoint or the next, as a whole."""
    path, over = tmp_path / "a", threading.Event()
    states = [train_state(7), train_state(8)]
    zerofn.save(path, states[0])

    def save():
        while not over.is_set():
            for state in states:
                zerofn.save(path, state)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        for _ in range(40):
            loaded = zerofn.load(path, like=train_state(1))
            assert any(not first_difference(loaded, state) for state in states)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("name", [folder.MANIFEST, folder.SAVING])
def test_files_of_others_with_these_names(tmp_path, name):
    (tmp_path / name).write_text(json.dumps({"name": "my web page"}))
    with pytest.raises(CheckpointError, match=f"{name} was not written by ZeroFn"):
        zerofn.save(tmp_path, train_state(7))
    assert json.loads((tmp_path / name).read_text()) == {"name": "my web page"}
