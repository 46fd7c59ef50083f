"""The folder of a run: what is removed, what stays, and what a process leaves that is killed or fails at any point."""

import errno
import os
import sys

import pytest
import torch

import zerofn
from tests.runs.test_manager import losses
from zerofn.checkpoint import CheckpointError, folder, owner, steps

CHANGES = ("open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")


def at_change(path, number, happens):
    """Let something happen right before the `number`-th change below a folder, in this process, for good."""
    count = 0

    def hook(event, args):
        nonlocal count
        if event not in CHANGES or not str(args[0]).startswith(str(path)) or (event == "open" and args[2] & 3 == 0):
            return
        count += 1
        if count == number:
            happens()

    sys.addaudithook(hook)


def train(path, until):
    """Train from where the folder stands: each step adds one to a number. Save after each, and keep one."""
    checkpoints = zerofn.Checkpoints(path, every=1, keep=1, async_=False, signals=())
    state = checkpoints.restore_or({"w": torch.zeros(3)})
    assert torch.equal(state["w"], torch.full((3,), float(checkpoints.step)))
    while checkpoints.step < until:
        state = {"w": state["w"] + 1}
        checkpoints.after_step(state)
    checkpoints.close()
    return checkpoints.step


def in_fork(work):
    """Return the exit status of a forked process that does the work."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.__stderr__)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def assert_one(path, step):
    """One checkpoint is there, and nothing else."""
    (there,) = path.iterdir()
    names = sorted(p.name for p in there.iterdir())
    assert there == steps.path_of(path, step)
    assert len(names) == 2 and names[0] == "manifest.json", names


def killed_at(path, number):
    """Whether a process was killed before the `number`-th change of two steps."""
    code = in_fork(lambda: (at_change(path, number, lambda: os._exit(9)), train(path, 2)))
    assert code in (0, 9)
    return code == 9


def test_a_process_killed_at_any_change_leaves_nothing_for_ever(tmp_path):
    number = 1
    while killed_at(tmp_path / f"{number}", number):
        path = tmp_path / f"{number}"
        there = steps.complete_steps(path)
        assert there or number < 12, "from the first save on there is always one"
        checkpoints = zerofn.Checkpoints(path, every=1, keep=1, async_=False, signals=())
        state = checkpoints.restore_or({"w": torch.zeros(3)})
        assert checkpoints.step == max(there, default=0) == state["w"][0]
        checkpoints.step = 9  # the save that was killed is not done again
        checkpoints.after_step(state)
        assert_one(path, 10)
        number += 1
    assert number > 20


def fail():
    raise OSError(errno.ENOSPC, "No space left on device")


def full_at(path, number):
    """A disk that is full for one change of two steps: the step is saved, or its save says so; the next is saved."""

    def work():
        checkpoints = zerofn.Checkpoints(path, every=1, keep=1, async_=False, signals=())
        state, told = checkpoints.restore_or({"w": torch.zeros(3)}), 0
        at_change(path, number, fail)
        for step in (1, 2, 3):
            try:
                checkpoints.after_step(state)
            except CheckpointError as error:
                assert "No space left" in str(error)
                assert step not in checkpoints.steps()
                told += 1
            else:
                assert step in checkpoints.steps()
        assert told <= 1
        assert_one(path, 3)

    assert in_fork(work) == 0


@pytest.mark.whole
def test_a_disk_that_is_full_at_any_change_costs_one_save_at_most(tmp_path):
    for number in range(1, 26):
        full_at(tmp_path / f"{number}", number)


def run_of(path, values, **options):
    """Save after every step; return what the folder has then."""
    return losses(path, values, async_=False, **options).steps()


def test_of_a_link_to_another_runs_checkpoint_the_link_alone_is_removed(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    assert run_of(old, [1.0, 1.0, 1.0]) == [1, 2, 3]
    new.mkdir()
    (new / "step-00000003").symlink_to(old / "step-00000003")
    before = {p: p.read_bytes() for p in old.rglob("*") if p.is_file()}
    assert run_of(new, [1.0], keep=2) == [3, 4] and (new / "step-00000003").is_symlink()
    assert run_of(new, [1.0], keep=2) == [4, 5] and not (new / "step-00000003").is_symlink()
    assert {p: p.read_bytes() for p in old.rglob("*") if p.is_file()} == before


def test_a_link_is_not_saved_through(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    run_of(old, [1.0])
    new.mkdir()
    (new / "step-00000001").symlink_to(old / "step-00000001")
    before = (old / "step-00000001/manifest.json").read_bytes()
    checkpoints = zerofn.Checkpoints(new, signals=())
    state = checkpoints.restore_or({"w": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"is a link, so saving would overwrite .*old/step-00000001"):
        checkpoints.save(state)
    assert (old / "step-00000001/manifest.json").read_bytes() == before
    checkpoints.after_step(state)
    checkpoints.save(state)
    assert checkpoints.steps() == [1, 2]


def test_what_cannot_be_removed_stays_and_ends_nothing(tmp_path, monkeypatch, caplog):
    stuck, unlink = ["manifest.json"], type(tmp_path).unlink

    def refuse(self, missing_ok=False):
        if self.parent.name == "step-00000001" and self.name.startswith(tuple(stuck)):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    assert run_of(tmp_path, [1.0, 1.0, 1.0, 1.0], keep=1) == [1, 4]
    assert zerofn.verify(tmp_path / "step-00000001") == []
    assert caplog.text.count("step-00000001 could not be removed, and stays: [Errno 1] Operation not permitted") == 1
    stuck[:] = ["rank-"]
    assert run_of(tmp_path, [1.0], keep=1) == [5] and (tmp_path / "step-00000001").exists()
    stuck.clear()
    run_of(tmp_path, [1.0], keep=1)
    assert_one(tmp_path, 6)


def test_the_best_is_the_one_from_before_the_first_step(tmp_path):
    checkpoints = zerofn.Checkpoints(tmp_path, every=1, keep=1, keep_best=("loss", "min"), async_=False, signals=())
    state = checkpoints.restore_or({"w": torch.zeros(3)})
    checkpoints.save(state, {"loss": 0.5})
    for loss in (2.0, 0.5001, 4.0):
        checkpoints.after_step(state, {"loss": loss})
    assert checkpoints.best_step() == 0 and checkpoints.steps() == [0, 3]
    checkpoints.after_step(state, {"loss": 0.5})  # of two equal the later
    assert checkpoints.steps() == [4]


def test_names_that_are_not_ours_are_no_steps(tmp_path):
    """Names of other lengths, of copies, with digits of other scripts; a folder or a link where a file should be."""
    run_of(tmp_path, [1.0])
    for name in ("step-000000007", "step-00000008.bak", "step-0000000\u0669"):
        (tmp_path / name).symlink_to(tmp_path / "step-00000001")
    (tmp_path / "step-00000009").write_text("mine")
    (tmp_path / "step-00000010/manifest.json").mkdir(parents=True)
    strange = tmp_path / "step-00000011"
    (strange / "rank-00000-of-00001.0123456789ab.safetensors").mkdir(parents=True)
    (strange / "rank-00000-of-00002.0123456789ab.safetensors").symlink_to(tmp_path / "gone")
    assert steps.complete_steps(tmp_path) == [1]
    before = sorted(tmp_path.rglob("*"))
    assert run_of(tmp_path, [1.0], keep=5) == [1, 2]
    assert set(before) < set(tmp_path.rglob("*"))


def test_what_a_process_that_lives_is_saving_stays(tmp_path, monkeypatch):
    """And what a silent one of another machine has left goes."""
    run_of(tmp_path, [1.0])
    path, mine = steps.path_of(tmp_path, 7), folder.new_save()
    path.mkdir()
    file = path / folder.file_of(0, 1, mine)
    with owner.saving(path, mine):
        file.touch()
        run_of(tmp_path, [1.0])
        assert len(list(path.iterdir())) == 2
        text = (path / folder.SAVING).read_text()
    elsewhere = text.replace('"host": "', '"host": "elsewhere ')
    folder.replace_text(path / folder.SAVING, elsewhere, mine)
    run_of(tmp_path, [1.0])
    assert len(list(path.iterdir())) == 2
    past = (path / folder.SAVING).stat().st_mtime - owner.SILENCE - 1
    os.utime(path / folder.SAVING, (past, past))
    run_of(tmp_path, [1.0])
    assert not path.exists()


def test_zeros_where_power_was_lost_are_cleared(tmp_path):
    path = steps.path_of(tmp_path, 1)
    path.mkdir()
    (path / folder.file_of(0, 1, folder.new_save())).write_bytes(bytes(5000))
    zerofn.save(path, {"w": torch.zeros(3)})
    assert_one(tmp_path, 1)


def test_a_damaged_sign_that_somebody_saves_is_nobodys_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "SILENCE", 0.2)
    zerofn.save(tmp_path / "a", {"w": torch.zeros(3)})
    (tmp_path / "a" / folder.SAVING).write_text('{"format": "zerofn-save", "sav')
    zerofn.save(tmp_path / "a", {"w": torch.ones(3)})
    assert len(list((tmp_path / "a").iterdir())) == 2
