"""Checkpoints anywhere that fsspec reaches: in memory, in an object store, on S3."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time

import fsspec
import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support import objects
from tests.support.checkpoint_states import train_state
from tests.support.library import ROOT
from tests.support.same import assert_same_trees
from zerofn import cli
from zerofn.checkpoint import CheckpointError, folder, locations, owner
from zerofn.util.process import the

pytestmark = pytest.mark.slow  # programs in processes of their own, and S3

PLACES = ("memory", "objects", "s3")


@pytest.fixture(scope="module")
def bucket():
    with objects.s3_server() as found:
        yield found


@pytest.fixture(params=PLACES)
def anywhere(request, tmp_path):
    """A new place: a URL, or of S3 a path with the options that reach it."""
    if request.param == "s3":
        return request.getfixturevalue("bucket") / tmp_path.name
    return f"memory://tests/{tmp_path.name}" if request.param == "memory" else f"objects://{tmp_path}/in"


def names_in(path):
    return sorted(p.name for p in locations.located(path).iterdir())


def below(path, name):
    return path / name if hasattr(path, "joinpath") else f"{path}/{name}"


def is_there(path, seed):
    assert_same_trees(zerofn.load(path, like=train_state(1)), train_state(seed))
    assert zerofn.verify(path) == [] and len(names_in(path)) == 2


@pytest.mark.whole
def test_one_save_after_the_other(anywhere):
    zerofn.save(anywhere, train_state(7))
    is_there(anywhere, 7)
    zerofn.save(anywhere, train_state(8))
    is_there(anywhere, 8)
    saving = zerofn.save(anywhere, train_state(9), wait=False)
    saving.wait(60)
    is_there(anywhere, 9)


@pytest.mark.part(anywhere=["memory", "objects"])
def test_bits_that_differ_are_told(anywhere):
    zerofn.save(anywhere, train_state(7))
    for name in names_in(anywhere):
        file = locations.located(anywhere) / name
        whole = file.read_bytes()
        for at in (len(whole) // 2, len(whole) - 2):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert len(zerofn.verify(anywhere)) == 1
            with pytest.raises(CheckpointError, match="damaged|format"):
                zerofn.load(anywhere, like=train_state(1))
        file.write_bytes(whole[:-5])
        with pytest.raises(CheckpointError, match="truncated|damaged"):
            zerofn.load(anywhere, like=train_state(1))
        file.write_bytes(whole)
    is_there(anywhere, 7)


@pytest.mark.part(anywhere=["objects"])
def test_what_others_have_put_there_stays(anywhere):
    zerofn.save(anywhere, train_state(7))
    strange = locations.located(anywhere) / "notes.txt"
    strange.write_text("mine")
    zerofn.save(anywhere, train_state(8))
    assert strange.read_text() == "mine" and len(names_in(anywhere)) == 3
    other = locations.located(below(anywhere, "other")) / "manifest.json"
    locations.make_folder(other.parent)
    other.write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        zerofn.save(below(anywhere, "other"), train_state(8))


def test_nothing_is_there(anywhere):
    with pytest.raises(CheckpointError, match="does not exist. Pass the path of a checkpoint"):
        zerofn.load(below(anywhere, "none"), like=train_state(1))


def save_at(path, stage):
    zerofn.save(path, zerofn.shard(train_state(7), stage=stage))


def load_at(path, stage):
    loaded = zerofn.load(path, like=zerofn.shard(train_state(1), stage=stage))
    assert_same_trees(zerofn.unshard(loaded), train_state(7))
    assert dist.get_world_size() == 3 or len(names_in(path)) == 3
    return zerofn.verify(path)


@pytest.mark.whole
@pytest.mark.parametrize("anywhere", PLACES[1:], indirect=True)
def test_several_ranks(ranks, anywhere):
    ranks(2, save_at, anywhere, 3)
    assert ranks(3, load_at, anywhere, 1) == [[]] * 3
    ranks(2, save_at, anywhere, 0)
    assert ranks(2, load_at, anywhere, 3) == [[]] * 2


def test_a_run(anywhere):
    state = train_state(7)
    checkpoints = zerofn.Checkpoints(anywhere, every=1, keep=2, keep_best=("loss", "min"), signals=())
    assert checkpoints.restore_or(state) is state
    for loss in (3.0, 1.0, 2.0, 4.0):
        checkpoints.after_step(state, {"loss": torch.tensor(loss)})
    checkpoints.close()
    assert checkpoints.steps() == [2, 3, 4] and checkpoints.best_step() == 2
    again = zerofn.Checkpoints(anywhere, every=1, signals=())
    assert_same_trees(again.restore_or(train_state(1)), state)
    assert again.step == 4
    again.close()


def test_a_save_that_fails_leaves_the_one_before(tmp_path):
    path = f"objects://{tmp_path}/{objects.FULL}"
    with pytest.raises(CheckpointError, match=r"No space left in the bucket: .*rank-00000"):
        zerofn.save(path, train_state(7))
    assert not (tmp_path / objects.FULL).exists()
    zerofn.save(tmp_path / objects.FULL, train_state(8))  # as a folder, it is not full
    with pytest.raises(CheckpointError, match="No space left"):
        zerofn.save(path, train_state(7))
    is_there(path, 8)


@pytest.mark.part(anywhere=["objects"])
def test_one_job_at_a_time(anywhere, monkeypatch):
    """A save by another process that lives is waited for; one that is silent is taken for dead."""
    monkeypatch.setattr(owner, "SILENCE", 1.0)
    monkeypatch.setattr(owner, "BEAT", 0.1)
    path = locations.located(anywhere)
    start, done = time.monotonic(), []

    def second():
        with owner.saving(path, "1" * 12):
            done.append(time.monotonic() - start)

    waits = threading.Thread(target=second)
    with owner.saving(path, "0" * 12):
        waits.start()
        time.sleep(1.5)
        owner.check_still(path, "0" * 12)
    waits.join(20)
    assert done[0] >= 1.5
    text = json.dumps({"format": "zerofn-save", "save": "2" * 12, "host": "elsewhere", "pid": 1, "job": "x"})
    folder.replace_text(path / folder.SAVING, text, "2" * 12)
    with owner.saving(path, "3" * 12):
        owner.check_still(path, "3" * 12)
        with pytest.raises(CheckpointError, match="now saves to"):
            owner.check_still(path, "2" * 12)
    assert not (path / folder.SAVING).exists()


@pytest.mark.part(anywhere=["objects"])
def test_a_sign_of_life_is_read_while_it_is_written(anywhere):
    file = locations.located(anywhere) / "saving.json"
    texts = ['{"beat": 1}\n', '{"beat": 1} \n']
    locations.make_folder(file.parent)
    locations.put(file, texts[0])
    over = threading.Event()

    def beats():
        while not over.is_set():
            locations.put(file, texts[1])
            locations.put(file, texts[0])

    thread = threading.Thread(target=beats)
    thread.start()
    try:
        assert all(json.loads(locations.text_of(file)) == {"beat": 1} for _ in range(60))
    finally:
        over.set()
        thread.join()


@pytest.mark.whole
def test_the_older_job_is_told(anywhere):
    zerofn.save(anywhere, train_state(7))
    saved = dict(the(owner.ThisProcess).saved)
    zerofn.save(anywhere, train_state(8))
    the(owner.ThisProcess).saved.update(saved)
    name = the(owner.ThisProcess).name
    the(owner.ThisProcess).name = "another"
    try:
        with pytest.raises(CheckpointError, match="since then another job"):
            zerofn.save(anywhere, train_state(9))
    finally:
        the(owner.ThisProcess).name = name
    is_there(anywhere, 8)


ENDS = """
import os, sys, torch, zerofn
state = {"w": torch.arange(3_000_000)}
zerofn.save("s3://bucket/" + sys.argv[1], state, wait=False)
"""


@pytest.fixture
def from_environment(bucket, monkeypatch):
    """S3 reached as users do: all but the URL is in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.storage_options["client_kwargs"]["endpoint_url"])


@pytest.mark.whole
def test_a_program_that_ends_while_it_saves(from_environment):
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ENDS, "ends"], env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    like = {"w": torch.zeros(3_000_000, dtype=torch.int64)}
    assert torch.equal(zerofn.load("s3://bucket/ends", like=like)["w"], torch.arange(3_000_000))


def test_commands(tmp_path, capsys):
    first, second = (f"objects://{tmp_path}/{k}" for k in (7, 8))
    zerofn.save(first, train_state(7))
    zerofn.save(second, train_state(8))
    assert cli.main(["inspect", first]) == 0
    assert cli.main(["verify", first]) == 0
    assert cli.main(["diff", first, second]) == 1
    printed = capsys.readouterr().out
    assert f"checkpoint    {first}" in printed and "every bit is as saved" in printed
    assert "step:" in printed


@pytest.mark.part(anywhere=["objects"])
def test_weights_are_read_and_exported(anywhere, tmp_path):
    state = train_state(7)
    zerofn.save(anywhere, state)
    (file,) = zerofn.export(anywhere, tmp_path / "weights.safetensors")
    remote = locations.located(below(anywhere, "weights.safetensors"))
    remote.write_bytes(file.read_bytes())
    read = zerofn.load_safetensors(below(anywhere, "weights.safetensors"), like=train_state(1).params)
    assert_same_trees(read, state.params)
    with pytest.raises(ValueError, match="is not a local path. Export to"):
        zerofn.export(anywhere, below(anywhere, "out"))


def test_a_bucket_that_is_not_there(from_environment):
    with pytest.raises(CheckpointError, match="'none' does not exist"):
        zerofn.save("s3://none/a", train_state(7))
    assert not fsspec.filesystem("s3").exists("none")


def test_paths_that_cannot_be(monkeypatch, tmp_path):
    assert locations.located(f"file://{tmp_path}") == tmp_path
    with pytest.raises(ValueError, match="chained file systems may serve old copies"):
        locations.located("simplecache::s3://bucket/a")
    with pytest.raises(ValueError, match="nowhere"):
        locations.located("nowhere://bucket/a")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'zerofn\[remote\]'"):
        zerofn.save("s3://bucket/a", train_state(7))
