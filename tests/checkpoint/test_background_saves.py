"""Saves behind the steps: what is written is the state as it was, whatever the steps do to its memory meanwhile."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.checkpoint_states import train_state
from tests.support.library import ROOT
from tests.support.same import assert_same_trees, first_difference
from tests.support.small_steps import apart, batch_of, build, state_of, train_step_of
from tests.support.tiered_steps import TIERS
from zerofn.checkpoint import CheckpointError, background_saves, tensor_file
from zerofn.checkpoint.background_saves import Saving
from zerofn.util.process import the


def slow_writes(patch, seconds: float) -> None:
    """Every tensor takes so long to write."""
    write = tensor_file._write
    patch.setattr(tensor_file, "_write", lambda *args: time.sleep(seconds) or write(*args))


def trained_meanwhile(folder, stage, tier, precision):
    """Train, save behind further steps, an evaluation and a gather; is what was saved what the state was?"""
    with pytest.MonkeyPatch.context() as patch:
        if tier.startswith("host"):
            apart(patch, 1.0)
        state = state_of(build(3), stage, offload=TIERS[tier](folder), precision=precision)
        step, batch = zerofn.compile(train_step_of(build(3))), batch_of(dist.get_rank() if dist.is_initialized() else 0)
        for _ in range(2):
            state, _ = step(state, batch)
        zerofn.save(folder / "plain", state)
        slow_writes(patch, 0.05)
        saving = zerofn.save(folder / "behind", state, wait=False)
        under_way = not saving.done()
        for _ in range(2):
            state, _ = step(state, batch)
        zerofn.gather(state.params)
        last = zerofn.unshard(state)
        saving.wait(60)
    assert under_way and saving.done() and saving.path == folder / "behind" and saving.blocked_s > 0
    like = state_of(build(3), stage, precision=precision)
    plain, found = (zerofn.unshard(zerofn.load(folder / name, like=like)) for name in ("plain", "behind"))
    assert_same_trees(found, plain)
    return first_difference(last, plain) != ""


CASES = [(0, "device", None), (1, "host", "bf16"), (2, "device", None), (3, "device", "bf16")]
CASES += [(3, "host, parameters", None), (3, "drive", None)]


@pytest.mark.part(size=[1])
@pytest.mark.part(size=[3], case=[1])
@pytest.mark.parametrize("size, case", [(n, k) for k in range(len(CASES)) for n in (1 + k % 3, 1 + (k + 1) % 3)])
def test_a_background_save_has_the_state_as_it_was(ranks, tmp_path, size, case):
    stage, tier, precision = CASES[case]
    assert all(ranks(size, trained_meanwhile, tmp_path, stage, tier, precision))


def full_disk(path, waits):
    state = zerofn.shard(train_state(7), stage=3)
    zerofn.save(path, state)
    with pytest.MonkeyPatch.context() as patch:

        def full(*_):
            raise OSError(28, "No space left on device")

        if dist.get_rank() == dist.get_world_size() - 1:
            patch.setattr(tensor_file, "_write", full)
        saving = zerofn.save(path, zerofn.shard(train_state(8), stage=3), wait=False)
        with pytest.raises(CheckpointError, match="No space left on device.*rank-0000") as caught:
            if waits:
                saving.wait()
            else:
                zerofn.save(path, state)
        saving.wait()  # it is said once
    assert ("the previous save" in str(caught.value)) != waits
    assert_same_trees(zerofn.unshard(zerofn.load(path, like=state)), train_state(7))
    zerofn.save(path, zerofn.shard(train_state(9), stage=3), wait=False).wait()
    assert_same_trees(zerofn.unshard(zerofn.load(path, like=state)), train_state(9))


@pytest.mark.parametrize("waits", [True, False])
def test_what_failed_is_raised_by_the_next_call(ranks, tmp_path, waits):
    ranks(2, full_disk, tmp_path / "a", waits)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_save_waits_for_the_one_before_it(tmp_path, monkeypatch):
    slow_writes(monkeypatch, 0.02)
    first = zerofn.save(tmp_path / "a", train_state(7), wait=False)
    with pytest.raises(TimeoutError, match="is not complete after 0.01 s. The save continues"):
        first.wait(timeout=0.01)
    assert "in flight" in repr(first)
    second = zerofn.save(tmp_path / "b", train_state(8), wait=False)
    assert first.done() and not second.done()
    third = zerofn.save(tmp_path / "c", train_state(9))
    assert second.done() and third.done() and "done" in repr(third)
    third.wait()
    for name, seed in (("a", 7), ("b", 8), ("c", 9)):
        assert_same_trees(zerofn.load(tmp_path / name, like=train_state(1)), train_state(seed))


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    zerofn.save(tmp_path / "a", train_state(7))
    slow_writes(monkeypatch, 0.05)
    saving = zerofn.save(tmp_path / "a", train_state(8), wait=False)
    assert_same_trees(zerofn.load(tmp_path / "a", like=train_state(1)), train_state(7))
    assert not saving.done()
    saving.wait()
    assert_same_trees(zerofn.load(tmp_path / "a", like=train_state(1)), train_state(8))


def test_memory_of_the_copy_is_used_again(tmp_path):
    zerofn.save(tmp_path / "a", train_state(7), wait=False).wait()
    memory = the(background_saves.Snapshot)._memory
    for seed in (8, 9):
        zerofn.save(tmp_path / "a", train_state(seed), wait=False).wait()
        assert the(background_saves.Snapshot)._memory is memory


def differing(path):
    state = {"params": torch.ones(1 << 18)}
    state["params"][77] = dist.get_rank()
    with pytest.raises(ValueError, match="replicated leaf 'params' differs between rank"):
        zerofn.save(path, state, wait=False)


def permuted(path):
    """The same words in another order on rank 1, in a replicated leaf and in one of stage 0, over 1 MiB each."""
    words = torch.arange(1 << 18).roll(dist.get_rank())
    sharded = zerofn.shard({"params": {"w": torch.zeros(1 << 18)}}, stage=0)
    with torch.no_grad():
        for shard in sharded["params"].shards:
            shard.copy_(words)
    for state, name in (({"params": torch.zeros(3), "order": words}, "order"), (sharded, "params.w")):
        for wait in (True, False):
            with pytest.raises(ValueError, match=f"replicated leaf '{name}' differs between rank"):
                zerofn.save(path, state, wait=wait)


def test_replicas_are_compared_before(ranks, tmp_path):
    ranks(2, differing, tmp_path / "a")
    ranks(2, permuted, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def taken_down(path):
    state = zerofn.shard(train_state(7), stage=3)
    with pytest.MonkeyPatch.context() as patch:
        slow_writes(patch, 0.2)
        saving = zerofn.save(path, state, wait=False)
        time.sleep(0.5)
        dist.destroy_process_group()
        with pytest.raises((CheckpointError, RuntimeError)):
            saving.wait(60)


def test_a_group_that_is_taken_down_meanwhile(ranks, tmp_path):
    ranks(2, taken_down, tmp_path / "a")
    ranks.stop()
    with pytest.raises(CheckpointError):
        zerofn.load(tmp_path / "a", like=train_state(1))


LAST_LINE = """
import sys, torch, zerofn, time
from zerofn.checkpoint import tensor_file
write = tensor_file._write
tensor_file._write = lambda *args: time.sleep(0.3) or write(*args)
saving = zerofn.save(sys.argv[1], {"w": torch.arange(5.0)}, wait=False)
assert not saving.done()
"""


@pytest.mark.whole
def test_the_end_of_the_program_waits(tmp_path):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", LAST_LINE, str(tmp_path / "a")]
    subprocess.run(command, env=environ, check=True, timeout=60)
    assert torch.equal(zerofn.load(tmp_path / "a", like={"w": torch.zeros(5)})["w"], torch.arange(5.0))


def test_a_save_whose_thread_cannot_start_says_so(tmp_path, monkeypatch):
    def full(thread):
        raise RuntimeError("can't start new thread")

    saving = Saving(tmp_path, 0.0)
    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        saving.begin("a thread", "", lambda: None)
    assert saving.done()
    saving.wait()
