"""Ranks of one attempt of a job meet, whatever an earlier one has left in the store; restarts by torchrun recover."""

import os
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import zerofn
from benchmarks.common.processes import free_port
from tests.support.library import ROOT
from tests.support.same import assert_same_trees
from zerofn.job import rendezvous as arrivals


def attempt(store, size, late=()):
    """Let threads arrive as ranks, in any order; return the store that each is given."""
    found = {}

    def come(rank):
        time.sleep(random.random() * 0.05 + (0.1 if rank in late else 0.0))
        found[rank] = arrivals.fresh(store, rank, size)

    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == size
    return found


@pytest.mark.part(size=[1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("late", [(), (0,), (1,)])
def test_every_attempt_has_keys_of_its_own(size, late):
    store = dist.HashStore()
    for ranks in (size, size, size + 1):
        found = attempt(store, ranks, late)
        assert not any(x.check(["word"]) for x in found.values())
        found[0].set("word", str(ranks))
        assert all(x.get("word") == str(ranks).encode() for x in found.values())


@pytest.mark.parametrize("died", [0, 1])
def test_after_an_attempt_in_which_a_rank_ended_before_it_came(died):
    """The rank that had come is started again, too."""
    store = dist.HashStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "PATIENCE", 0.05)
        with pytest.raises(RuntimeError, match=rf"rank {died} did not start within 0.05 s of the job's start"):
            arrivals.fresh(store, 1 - died, 2)
    attempt(store, 2)


def test_ranks_that_have_not_come_are_named(monkeypatch, caplog):
    monkeypatch.setattr(arrivals, "FIRST_WORD", 0.02)
    monkeypatch.setattr(arrivals, "NEXT_WORD", 0.02)
    monkeypatch.setattr(arrivals, "PATIENCE", 0.2)
    with pytest.raises(RuntimeError, match=r"rank 1, 2, 3, 4, 5, 6, 7, 8 and 3 more did not start"):
        arrivals.fresh(dist.HashStore(), 0, 12)
    said = [x.getMessage() for x in caplog.records]
    assert len(said) > 2 and all("rank 1, 2, 3" in x for x in said)


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_without_a_launchers_store_say_for_whom_they_wait(late, monkeypatch, caplog):
    """Rank 0 holds the store, and may come first or last."""
    monkeypatch.setattr(arrivals, "FIRST_WORD", 0.05)
    address, found = ("127.0.0.1", free_port()), {}

    def come(rank):
        store = arrivals.store_at(address, rank, held_for_us=False)
        found[rank] = arrivals.fresh(store, rank, 2)

    early, other = (threading.Thread(target=come, args=(rank,), daemon=True) for rank in (1 - late, late))
    early.start()
    early.join(0.3)
    assert early.is_alive() and f"for rank {late}" in caplog.text
    other.start()
    for thread in (early, other):
        thread.join(20)
    found[0].set("word", "yes")
    assert found[1].get("word") == b"yes"


def test_a_rank_0_that_never_listens_is_named(monkeypatch):
    monkeypatch.setattr(arrivals, "PATIENCE", 0.05)
    port = free_port()
    with pytest.raises(RuntimeError, match=rf"rank 0, which is to listen at 127.0.0.1:{port}, did not start within"):
        arrivals.store_at(("127.0.0.1", port), 1, held_for_us=False)


JOB = """
import os, signal, torch, zerofn
import torch.distributed as dist
from pathlib import Path
from zerofn import optim

path, attempt = Path(os.environ["FOLDER"]) / "checkpoint", int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def train_step(state, batch):
    grads, loss = torch.func.grad_and_value(lambda p: (zerofn.gather(p)["w"] @ batch).square().mean())(state.params)
    return state.apply_gradients(grads), loss

init = lambda: zerofn.TrainState.create(params={"w": torch.linspace(-1, 1, 35).view(5, 7)}, tx=optim.adamw(1e-2))
state, step = zerofn.shard(init, stage=3), zerofn.compile(train_step)
if (path / "manifest.json").exists():
    state = zerofn.load(path, like=state)
for k in range(int(state.step), 6):
    state, _ = step(state, torch.sin(torch.arange(7.0) + k + dist.get_rank()))
    zerofn.save(path, state)
    if os.environ["KILL"] == "yes" and attempt < 2 and k == 1 + 2 * attempt and dist.get_rank() == attempt:
        os.kill(os.getpid(), signal.SIGKILL)
if dist.get_rank() == 0:
    print("attempt", attempt, "at", int(state.step))
"""


def run(folder, kill):
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.05"]
    environ = {**os.environ, "FOLDER": str(folder), "KILL": kill, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    job = [sys.executable, *command, str(folder / "job.py")]
    return subprocess.run(job, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.whole
def test_torchrun_starts_killed_ranks_again(tmp_path):
    """Rank 0 and rank 1 are killed once each. The end is that of a run that nothing happened to, bit for bit."""
    whole, killed = run(tmp_path / "whole", "no"), run(tmp_path / "killed", "yes")
    assert "attempt 0 at 6" in whole.stdout, whole.stderr
    assert "attempt 2 at 6" in killed.stdout, killed.stderr
    like = zerofn.TrainState.create(params={"w": torch.zeros(5, 7)}, tx=zerofn.optim.adamw(1e-2))
    first, second = (zerofn.load(tmp_path / name / "checkpoint", like=like) for name in ("whole", "killed"))
    assert_same_trees(first, second)
