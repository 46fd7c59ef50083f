"""A process killed anywhere in a save leaves the old checkpoint or the new one, never neither."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.checkpoint_states import train_state
from tests.support.same import assert_same_trees, first_difference
from zerofn.checkpoint import CheckpointError, folder, owner, saving, tensor_file
from zerofn.job import agreement

OLD, NEW = 7, 8


def die(*_) -> None:
    os._exit(9)


def die_at(point: str) -> None:
    """Let this process end at a point of the next save."""
    if point == "open":
        tensor_file._header = lambda *_: die()
    elif point == "write":
        tensor_file._write = lambda write, *_: write(memoryview(bytearray(b"half"))) or die()
    elif point == "before the manifest":
        owner.check_still = die
    elif point == "half a manifest":
        folder.os.fsync = lambda _: os.path.exists("/proc/self") and die()
    elif point == "manifest":
        replace = os.replace
        folder.os.replace = lambda a, b: die() if str(b).endswith("manifest.json") else replace(a, b)
    elif point == "written":  # while rank 0 lets the manifest name what both have written
        real, saving.write_all = (
            saving.write_all,
            lambda *args: (real(*args), setattr(saving.OneSave, "on_rank_0", die))[0],
        )
    elif point == "clean up":
        saving._remove = lambda files: len(list(files)) and die()


def save_and_die(path: Path, point: str, rank: int) -> None:
    agreement.PATIENCE = 2.0
    zerofn.save(path, zerofn.shard(train_state(OLD), stage=3))
    if dist.get_rank() == rank:
        die_at(point)
    zerofn.save(path, zerofn.shard(train_state(NEW), stage=3))


def seed_at(path: Path) -> int | None:
    """Which state a checkpoint holds."""
    loaded = zerofn.load(path, like=train_state(1))
    return next((seed for seed in (OLD, NEW) if not first_difference(loaded, train_state(seed))), None)


@pytest.mark.part(point=["write"], rank=[1])
@pytest.mark.part(point=["before the manifest"])
@pytest.mark.parametrize(
    "point, rank, found",
    [
        ("open", 1, OLD),
        ("write", 1, OLD),
        ("write", 0, OLD),
        ("written", 1, NEW),
        ("before the manifest", 0, OLD),
        ("manifest", 0, OLD),
        ("clean up", 0, NEW),
    ],
)
def test_killed(ranks, tmp_path, point, rank, found):
    path = tmp_path / "checkpoint"
    replies = ranks(2, save_and_die, path, point, rank, expect_errors=True)
    assert replies[rank].type == "Died" and replies[rank].message.endswith("code 9")
    other = replies[1 - rank]
    assert f"rank {rank} gave no sign of life for 2 s" in other.message
    assert seed_at(path) == found
    zerofn.save(path, train_state(NEW))  # the next save takes away what was left
    assert_alone(path, NEW)


def assert_alone(path: Path, seed: int) -> None:
    """A checkpoint of one file is there, and nothing else."""
    assert seed_at(path) == seed
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    first, second = sorted(p.name for p in path.iterdir())
    assert first == "manifest.json" and second.startswith("rank-00000-of-00001.")


def save_until(path: Path, point: str, seed: int) -> None:
    die_at(point)
    zerofn.save(path, train_state(seed))


@pytest.mark.parametrize("point", ["open", "write", "half a manifest", "manifest"])
def test_the_first_save_killed(ranks, tmp_path, point):
    path = tmp_path / "checkpoint"
    (reply,) = ranks(1, save_until, path, point, OLD, expect_errors=True)
    assert reply.type == "Died"
    with pytest.raises(CheckpointError, match="because the save was interrupted|not a complete checkpoint"):
        seed_at(path)
    zerofn.save(path, train_state(NEW))
    assert_alone(path, NEW)


@pytest.mark.parametrize("mine", ["a.old", "a.saving", "a.zerofn", ".a"])
def test_folders_and_files_of_others_stay(tmp_path, mine):
    """Even those that have names as ours."""
    (tmp_path / mine).mkdir()
    zerofn.save(tmp_path / mine, train_state(9))
    zerofn.save(tmp_path / "a", train_state(OLD))
    others = {"notes.txt": "mine", "rank-00000-of-00001.0123456789ab.safetensors": "mine", "manifest.json.bak": "mine"}
    for name, text in others.items():
        (tmp_path / "a" / name).write_text(text)
    zerofn.save(tmp_path / "a", train_state(NEW))
    zerofn.save(tmp_path / "a", train_state(NEW))
    assert {name: (tmp_path / "a" / name).read_text() for name in others} == others
    assert len(list((tmp_path / "a").iterdir())) == 2 + len(others)
    assert seed_at(tmp_path / "a") == NEW and zerofn.load(tmp_path / mine, like=train_state(1)) is not None


def save_what_rank_0_does_not_see(path: Path) -> list[str]:
    """Once the file of rank 1 is not there, once it is cut off."""
    zerofn.save(path, zerofn.shard(train_state(OLD), stage=3))
    before, write, errors = {p.name for p in path.iterdir()}, saving.write_file, []

    def mine():
        return next(p for p in path.iterdir() if p.name not in before and p.name.startswith("rank-00001"))

    for hide in (lambda: mine().unlink(), lambda: os.truncate(mine(), mine().stat().st_size - 1)):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(saving, "write_file", lambda *args, hide=hide, **kw: (write(*args, **kw), hide())[0])
            with pytest.raises(CheckpointError) as caught:
                zerofn.save(path, zerofn.shard(train_state(NEW), stage=3))
            errors.append(str(caught.value))
    return errors


def test_a_file_that_rank_0_does_not_see(ranks, tmp_path):
    for errors in ranks(2, save_what_rank_0_does_not_see, tmp_path / "a"):
        assert len(errors) == 2
        assert all("rank 0 cannot see all of" in e and "rank-00001-of-00002" in e for e in errors)
    assert seed_at(tmp_path / "a") == OLD and [p.name for p in tmp_path.iterdir()] == ["a"]


def save_with_full_disk(path: Path) -> list[str]:
    """The last rank's disk fails; the next save works again."""
    state = zerofn.shard(train_state(OLD), stage=3)
    zerofn.save(path, state)
    real = tensor_file._write
    if dist.get_rank() == dist.get_world_size() - 1:

        def full(*_):
            raise OSError(28, "No space left on device")

        tensor_file._write = full
    errors = []
    try:
        zerofn.save(path, zerofn.shard(train_state(NEW), stage=3))
    except CheckpointError as error:
        errors.append(str(error))
    assert_same_trees(zerofn.unshard(zerofn.load(path, like=state)), train_state(OLD))
    tensor_file._write = real
    zerofn.save(path, zerofn.shard(train_state(NEW), stage=3))
    return errors


def test_full_disk(ranks, tmp_path):
    for errors in ranks(2, save_with_full_disk, tmp_path / "a"):
        assert len(errors) == 1 and "No space left on device" in errors[0] and "rank-0000" in errors[0]
    assert seed_at(tmp_path / "a") == NEW
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_rename_that_fails(tmp_path, monkeypatch):
    path = tmp_path / "a"
    zerofn.save(path, train_state(OLD))
    replace = os.replace

    def fail(a, b):
        if str(b).endswith("manifest.json"):
            raise PermissionError(1, "Operation not permitted", "a")
        replace(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "replace", fail)
        with pytest.raises(CheckpointError, match="Operation not permitted"):
            zerofn.save(path, train_state(NEW))
    assert_alone(path, OLD)
    zerofn.save(path, train_state(NEW))
    assert_alone(path, NEW)


def test_an_empty_folder_and_a_link_are_paths_too(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    zerofn.save(tmp_path / "link", train_state(OLD))
    zerofn.save(str(tmp_path / "link"), train_state(NEW))
    assert (tmp_path / "link").is_symlink()
    assert seed_at(tmp_path / "link") == seed_at(tmp_path / "real") == NEW
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def slowly(function, seconds):

    def slow(*args):
        time.sleep(seconds)
        return function(*args)

    return slow


def save_and_load_slowly(path: Path) -> list[str]:
    """Rank 1 reads, checks and writes for longer than patience lasts."""
    block, num = 1 << 12, 24
    state = {"params": {"w": torch.arange(2.0 * num * block // 4)}, "table": torch.arange(1.0 * num * block // 4)}
    state = zerofn.shard(state, stage=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PATIENCE", 1.0)
        patch.setattr(tensor_file, "BLOCK", block)
        if dist.get_rank() == 1:
            patch.setattr(saving, "checksum", slowly(saving.checksum, 2.5))
            patch.setattr(tensor_file, "as_bytes", slowly(tensor_file.as_bytes, 0.1))
            patch.setattr(tensor_file.TensorFile, "_load", slowly(tensor_file.TensorFile._load, 0.05))
        zerofn.save(path, state)
        assert_same_trees(zerofn.load(path, like=state), state)


def test_ranks_at_work_are_waited_for(ranks, tmp_path):
    ranks(2, save_and_load_slowly, tmp_path / "a")


def test_torch_is_not_asked_to_pickle(tmp_path, monkeypatch):
    import pickle

    def refuse(*_, **__):
        raise AssertionError("pickled")

    for module, name in ((pickle, "dump"), (pickle, "dumps"), (pickle, "load"), (pickle, "loads"), (torch, "save")):
        monkeypatch.setattr(module, name, refuse)
    zerofn.save(tmp_path / "a", train_state(OLD))
    assert seed_at(tmp_path / "a") == OLD
