"""A process killed anywhere in a save leaves the old checkpoint or the new one, never neither."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import differences, train_state

import zerofn
from zerofn import agreement
from zerofn.checkpoint import CheckpointError, folder, tensor_file

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
    return next((seed for seed in (OLD, NEW) if not differences(loaded, train_state(seed))), None)


@pytest.mark.parametrize(
    "point, rank, found",
    [
        ("write", 1, OLD),
        ("write", 0, OLD),
        ("manifest", 0, OLD),
        ("between renames", 0, NEW),
        ("clean up", 0, NEW),
    ],
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
    assert differences(zerofn.unshard(zerofn.load(path, like=state)), train_state(OLD)) == []
    tensor_file._write = real
    zerofn.save(path, zerofn.shard(train_state(NEW), stage=3))
    return errors


def test_full_disk(ranks, tmp_path):
    for errors in ranks(2, save_with_full_disk, tmp_path / "a"):
        assert len(errors) == 1 and "No space left on device" in errors[0]
    assert seed_at(tmp_path / "a") == NEW
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_rename_that_fails(tmp_path, monkeypatch):
    zerofn.save(tmp_path / "a", train_state(OLD))

    def fail(*_):
        raise PermissionError(1, "Operation not permitted", "a")

    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "replace", fail)
        with pytest.raises(CheckpointError, match="Operation not permitted"):
            zerofn.save(tmp_path / "a", train_state(NEW))
    assert seed_at(tmp_path / "a") == OLD


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


def work_long(seconds: float) -> list[str]:
    """Rank 1 is busy for longer than patience lasts, and says so."""
    import time

    agreement.PATIENCE = 2.0
    if dist.get_rank() == 1:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.1)
            agreement.alive()
    out = agreement.exchange("test", str(dist.get_rank()))
    agreement.PATIENCE = 30.0
    return out


def test_a_rank_at_work_is_waited_for(ranks):
    assert ranks(2, work_long, 5.0) == [["0", "1"]] * 2


def test_torch_is_not_asked_to_pickle(tmp_path, monkeypatch):
    import pickle

    def refuse(*_, **__):
        raise AssertionError("pickled")

    for module, name in (
        (pickle, "dump"),
        (pickle, "dumps"),
        (pickle, "load"),
        (pickle, "loads"),
        (torch, "save"),
    ):
        monkeypatch.setattr(module, name, refuse)
    zerofn.save(tmp_path / "a", train_state(OLD))
    assert seed_at(tmp_path / "a") == OLD
