"""`Checkpoints`: runs that start, stop and go on, and what is kept of them."""

import json
import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from zerofn.checkpoint import CheckpointError, owner, steps
from zerofn.runs import stopping
from zerofn.runs.stopping import Stopped
from zerofn.util.process import instead


class Counter:
    """A loader without end: batches by number. `own`: each rank counts from another number. `same`: all ranks have
    the same rows."""

    def __init__(self, own=False, same=False):
        self.same = same
        self.at = 100 * dist.get_rank() if own and dist.is_initialized() else 0

    def __iter__(self):
        while True:
            self.at += 1
            yield batch_of(0 if self.same else rank_now(), seed=self.at)

    def state_dict(self):
        return {"at": self.at, "buffer": (b"\0", torch.arange(3))}

    def load_state_dict(self, state):
        assert state["buffer"][0] == b"\0"
        self.at = state["at"]


def rank_now():
    return dist.get_rank() if dist.is_initialized() else 0


def run(folder, until, stage=0, **options):
    """Train until a step, from where the folder stands; return the state and the metrics of the last step."""
    loader = Counter()
    checkpoints = zerofn.Checkpoints(folder, loader=loader, signals=(), **options)
    state = checkpoints.restore_or(lambda: state_of(build(2), stage))
    step, metrics = zerofn.compile(train_step_of(build(2))), None
    for batch in loader:
        if checkpoints.step == until:
            break
        state, metrics = step(state, batch)
        checkpoints.after_step(state, metrics)
    checkpoints.close()
    return zerofn.unshard(state), checkpoints


def resumed(folder, stage):
    whole, _ = run(folder / "whole", 9, stage)
    for until in (0, 4, 5, 9, 9):
        parts, checkpoints = run(folder / "parts", until, stage, every=2, keep=2)
    assert_same_trees(parts, whole)
    return checkpoints.steps()


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size, stage", [(1, 0), (2, 3), (3, 1)])
def test_a_run_in_parts_is_the_run_in_one(ranks, tmp_path, size, stage):
    """What was trained since the last save is trained again."""
    assert ranks(size, resumed, tmp_path, stage) == [[6, 8]] * size
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == ["step-00000006", "step-00000008"]


def go_on(folder, until, stage):
    loader = Counter()
    checkpoints = zerofn.Checkpoints(folder, loader=loader, every=3, signals=())
    state = checkpoints.restore_or(state_of(build(2), stage))
    before = checkpoints.step, loader.at
    while checkpoints.step < until:
        checkpoints.after_step(state)
    checkpoints.save(state)
    return before


def test_another_number_of_ranks_goes_on(ranks, tmp_path):
    assert ranks(2, go_on, tmp_path, 4, 3) == [(0, 0)] * 2
    assert ranks(3, go_on, tmp_path, 5, 1) == [(4, 0)] * 3
    assert go_on(tmp_path, 6, 0) == (5, 0)


def loaders_of_their_own(folder):
    loader = Counter(own=True)
    checkpoints = zerofn.Checkpoints(folder, loader=loader, signals=())
    state = checkpoints.restore_or({"w": torch.zeros(3)})
    if checkpoints.step == 0:
        loader.at += 7
        checkpoints.after_step(state)
        checkpoints.save(state)
    return loader.at


def test_loaders_that_stand_elsewhere_on_each_rank(ranks, tmp_path):
    assert ranks(3, loaders_of_their_own, tmp_path) == [7, 107, 207]
    assert ranks(3, loaders_of_their_own, tmp_path) == [7, 107, 207]
    with pytest.raises(CheckpointError, match="loader position for each of 3 ranks, but this job has 1 ranks"):
        loaders_of_their_own(tmp_path)


def losses(folder, values, **options):
    """Save after every step, with these losses."""
    checkpoints = zerofn.Checkpoints(folder, every=1, signals=(), **options)
    state = checkpoints.restore_or({"w": torch.zeros(3)})
    for value in values:
        checkpoints.after_step(state, {"loss": torch.tensor(value), "by_class": torch.zeros(4), "name": 3})
    checkpoints.close()
    return checkpoints


@pytest.mark.whole
def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path, caplog):
    values = [3.0, 1.0, 2.0, float("nan"), 5.0, 4.0]
    assert losses(tmp_path / "a", values, keep=2).steps() == [5, 6]
    assert losses(tmp_path / "b", values, keep=None).steps() == [1, 2, 3, 4, 5, 6]
    lowest = losses(tmp_path / "c", values, keep=1, keep_best=("loss", "min"))
    assert lowest.steps() == [2, 6] and lowest.best_step() == 2
    highest = losses(tmp_path / "d", values, keep=1, keep_best=("loss", "max"), async_=False)
    assert highest.steps() == [5, 6] and highest.best_step() == 5
    assert losses(tmp_path / "c", [0.5], keep=1, keep_best=("loss", "min")).steps() == [7]
    losses(tmp_path / "e", [1.0], keep=1, keep_best=("val_loss", "min"))
    assert "step 1 has only the metrics 'loss', 'name'" in caplog.text
    notes = json.loads((tmp_path / "c/step-00000007/manifest.json").read_text())["notes"]
    assert notes == {"metrics": {"loss": 0.5, "name": 3.0}}


def test_files_of_others_stay(tmp_path):
    losses(tmp_path, [1.0], keep=1)
    (tmp_path / "step-00000001/mine.txt").write_text("mine")
    (tmp_path / "step-9").mkdir()
    losses(tmp_path, [1.0, 1.0], keep=1)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file() and p.suffix == ".txt"} == {
        "step-00000001/mine.txt"
    }
    assert steps.complete_steps(tmp_path) == [3] and (tmp_path / "step-9").is_dir()


def flip(folder, step):
    (file,) = steps.path_of(folder, step).glob("rank-00000-*")
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)


def past_damage(folder):
    size = dist.get_world_size() if dist.is_initialized() else 1
    losses(folder, [1.0, 2.0, 3.0])
    if rank_now() == 0:
        flip(folder, 3)
        flip(folder, 2)
    if size > 1:
        dist.barrier()
    checkpoints = losses(folder, [])
    assert checkpoints.step == 1
    assert losses(folder, [5.0], keep=1).steps() == [2, 3]  # 3 is damaged, and not yet passed
    assert losses(folder, [5.0, 5.0], keep=1).steps() == [4]


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2])
def test_damaged_ones_are_passed_over(ranks, tmp_path, size):
    ranks(size, past_damage, tmp_path / "a")


def test_all_are_damaged_or_of_another_model(tmp_path, caplog):
    losses(tmp_path, [1.0, 2.0])
    with pytest.raises(CheckpointError, match="has no leaf 'b'"):
        zerofn.Checkpoints(tmp_path, signals=()).restore_or({"w": torch.zeros(3), "b": torch.zeros(1)})
    flip(tmp_path, 1)
    flip(tmp_path, 2)
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="all 2 checkpoints in .* are damaged"):
        losses(tmp_path, [])
    assert sum("is skipped: " in r.getMessage() for r in caplog.records) == 2


def test_another_job_in_the_folder(tmp_path):
    first = losses(tmp_path, [1.0])
    with instead(owner.ThisProcess()):
        second = losses(tmp_path, [1.0, 2.0])
    with pytest.raises(CheckpointError, match=r"step-00000002 was saved by another job .*Use a different folder"):
        first.save({"w": torch.ones(3)})
    assert second.steps() == [1, 2, 3]


def test_a_run_stops_and_saves_when_its_time_is_over(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))

    def timed(**options):
        checkpoints = zerofn.Checkpoints(tmp_path, signals=(), **options)
        state = checkpoints.restore_or({"w": torch.zeros(3)})
        for _ in range(3):
            now[0] += 20
            checkpoints.after_step(state, {"loss": 1.0})

    with pytest.raises(Stopped, match="stopped after step 2, because of its time is over after 40 s") as caught:
        timed(time_limit=30)
    assert caught.value.code == 75 and steps.complete_steps(tmp_path) == [2]
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    with pytest.raises(Stopped, match="stopped after step 3"):
        timed()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    timed()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"every": 0}, "every must be a number of steps"),
        ({"keep": 0}, "keep must be a number"),
        ({"keep_best": "loss"}, "keep_best must be a metric and 'min' or 'max'"),
        ({"keep_best": ("loss", "min"), "keep": None}, "keep_best has no effect"),
        ({"loader": [1]}, r"a list does not. Use torchdata's StatefulDataLoader"),
        ({"time_limit": 0}, "seconds above 0"),
    ],
)
def test_options_that_make_no_sense(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        zerofn.Checkpoints(tmp_path, **options)


def test_a_folder_that_cannot_be_one_is_told_before_the_first_step(tmp_path, monkeypatch, caplog):
    (tmp_path / "a").write_text("mine")
    for path in (tmp_path / "a", tmp_path / "a/b"):
        with pytest.raises(CheckpointError, match="a is a file, so .* cannot be a folder. Choose another path"):
            zerofn.Checkpoints(path, signals=()).restore_or({})
    monkeypatch.setattr("os.access", lambda path, mode: False)
    zerofn.Checkpoints(tmp_path / "b/c", signals=()).restore_or({})
    assert not caplog.text
    zerofn.Checkpoints(tmp_path / "b/c", every=3, signals=()).restore_or({})
    assert f"{tmp_path} is not writable, so the first save will fail" in caplog.text


def test_metrics_are_real_numbers(tmp_path):
    metrics = {"a": np.float32(0.5), "b": torch.tensor([2]), "c": 10**400, "d": 1j, "e": torch.tensor(1j), "f": True}
    checkpoints = zerofn.Checkpoints(tmp_path, signals=(), keep_best=("a", "max"))
    checkpoints.restore_or({})
    checkpoints.save({"w": torch.zeros(3)}, metrics)
    notes = json.loads((tmp_path / "step-00000000/manifest.json").read_text())["notes"]
    assert notes == {"metrics": {"a": 0.5, "b": 2.0, "f": 1.0}} and checkpoints.best_step() == 0


def test_the_order_of_calls(tmp_path):
    checkpoints = zerofn.Checkpoints(tmp_path, signals=())
    with pytest.raises(ValueError, match=r"after_step: call restore_or\(state\) first"):
        checkpoints.after_step({})
    with pytest.raises(ValueError, match="the best checkpoint is not defined"):
        checkpoints.best_step()
    checkpoints.restore_or({})
    with pytest.raises(ValueError, match="restore_or was already called"):
        checkpoints.restore_or({})


def test_a_loader_that_was_not_saved(tmp_path, caplog):
    losses(tmp_path / "a", [1.0])
    with pytest.raises(CheckpointError, match="does not contain the position of the data loader"):
        losses(tmp_path / "a", [], loader=Counter())
    losses(tmp_path / "b", [1.0], loader=Counter())
    losses(tmp_path / "b", [])
    assert "contains the position of a data loader" in caplog.text
