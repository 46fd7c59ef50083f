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
from zerofn.checkpoint import CheckpointError, folder, saving, tensor_file
from zerofn.comm import agreement, failures
from zerofn.util.process import the

OLD, NEW = 7, 8


def die(*_) -> None:
    os._exit(9)


def die_at(point: str) -> None:
    """Let this process end at a point of the next save."""
    if point == "write":
        tensor_file._write = lambda file, *_: file.write(b"half") and die()
    elif point == "manifest":
        folder.put_in_place = die
    elif point == "between renames":
        rename = os.replace
        folder.os.replace = lambda a, b: die() if str(a).endswith(".saving") else rename(a, b)
    elif point == "clean up":
        folder.clean_up = lambda path: folder.old(path).exists() and die()


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


@pytest.mark.parametrize(
    "point, rank, found",
    [("write", 1, OLD), ("write", 0, OLD), ("manifest", 0, OLD), ("between renames", 0, NEW), ("clean up", 0, NEW)],
)
def test_killed(ranks, tmp_path, point, rank, found):
    path = tmp_path / "checkpoint"
    replies = ranks(2, save_and_die, path, point, rank, expect_errors=True)
    assert replies[rank].type == "Died" and replies[rank].message.endswith("code 9")
    other = replies[1 - rank]
    if point == "clean up":  # all was done
        assert other is None
    else:
        assert f"rank {rank} did not come within 2 s" in other.message
    assert seed_at(path) == found
    zerofn.save(path, train_state(NEW))  # the next save takes away what was left
    assert seed_at(path) == NEW
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "rank-00000-of-00001.safetensors"]


def save_until(path: Path, point: str, seed: int) -> None:
    die_at(point)
    zerofn.save(path, train_state(seed))


@pytest.mark.parametrize("first", [True, False])
def test_killed_just_before_the_end_and_again_in_the_next_save(ranks, tmp_path, first):
    """The complete one that had no place yet is not taken for what is left of an unfinished one."""
    path = tmp_path / "checkpoint"
    if not first:
        zerofn.save(path, train_state(OLD))
    for point, seed in (("between renames", NEW), ("write", 9)):
        (reply,) = ranks(1, save_until, path, point, seed, expect_errors=True)
        assert reply.type == "Died" and seed_at(path) == NEW
    zerofn.save(path, train_state(OLD))
    assert seed_at(path) == OLD and [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def save_what_rank_0_does_not_see(path: Path) -> list[str]:
    """Once the file of rank 1 is not there, once it is cut off."""
    zerofn.save(path, zerofn.shard(train_state(OLD), stage=3))
    mine, collect, errors = folder.saving(path) / folder.file_of(1, 2), saving._collect, []
    for hide in (mine.unlink, lambda: os.truncate(mine, mine.stat().st_size - 1)):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(saving, "_collect", lambda written, hide=hide: hide() or collect(written))
            with pytest.raises(CheckpointError) as caught:
                zerofn.save(path, zerofn.shard(train_state(NEW), stage=3))
            errors.append(str(caught.value))
    return errors


def test_a_file_that_rank_0_does_not_see(ranks, tmp_path):
    for errors in ranks(2, save_what_rank_0_does_not_see, tmp_path / "a"):
        assert len(errors) == 2
        assert all("rank 0 does not see the whole of" in e and "rank-00001-of-00002" in e for e in errors)
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
        assert len(errors) == 1 and "No space left on device" in errors[0]
    assert seed_at(tmp_path / "a") == NEW
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("which, found", [(1, OLD), (2, NEW)])
def test_a_rename_that_fails(tmp_path, monkeypatch, which, found):
    """The second one: the old checkpoint has made room, and the new one is complete."""
    path, rename, calls = tmp_path / "a", os.replace, []
    zerofn.save(path, train_state(OLD))

    def fail(*names):
        calls.append(names)
        if len(calls) == which:
            raise PermissionError(1, "Operation not permitted", "a")
        rename(*names)

    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "replace", fail)
        with pytest.raises(CheckpointError, match="Operation not permitted"):
            zerofn.save(path, train_state(NEW))
    assert seed_at(path) == found
    zerofn.save(path, train_state(OLD))
    assert seed_at(path) == OLD and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_files_of_others_stay(tmp_path):
    zerofn.save(tmp_path / "a", train_state(OLD))
    (tmp_path / "a" / "notes.txt").write_text("mine")
    zerofn.save(tmp_path / "a", train_state(NEW))
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert seed_at(tmp_path / "a") == NEW


def test_an_empty_folder_and_a_link_are_paths_too(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    zerofn.save(tmp_path / "link", train_state(OLD))
    zerofn.save(str(tmp_path / "link"), train_state(NEW))
    assert (tmp_path / "link").is_symlink()
    assert seed_at(tmp_path / "link") == seed_at(tmp_path / "real") == NEW
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def slowly(function, seconds):
    """`function`, slow, and with a sign of life due at every call: `alive` gives one a second."""

    def slow(*args):
        time.sleep(seconds)
        the(failures.Signs).last = 0.0
        return function(*args)

    return slow


def save_and_load_slowly(path: Path) -> list[str]:
    """Rank 1 reads, checks and writes for longer than patience lasts."""
    block, num = 1 << 12, 24
    state = {"params": {"w": torch.arange(2.0 * num * block // 4)}, "table": torch.arange(1.0 * num * block // 4)}
    state = zerofn.shard(state, stage=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PATIENCE", 1.0)
        for module in (tensor_file, saving):
            patch.setattr(module, "BLOCK", block)
        if dist.get_rank() == 1:
            patch.setattr(saving, "as_bytes", slowly(saving.as_bytes, 0.1))
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
