"""Checkpoints that cannot be loaded: every rank raises a sentence, and the state it had still works."""

import contextlib
import functools
import json
import math
import os
import random
import re
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.checkpoint_states import mixed_state, train_state
from tests.support.same import assert_same_trees
from zerofn import tree
from zerofn.checkpoint import CheckpointError, loading, manifest, reports


def save_one(folder: Path) -> None:
    zerofn.save(folder / "good", zerofn.shard(train_state(7), stage=3))
    zerofn.save(folder / "better", zerofn.shard(train_state(8), stage=3))


def load_each(folder: Path, cases: dict) -> dict[str, tuple[str, str]]:
    """{case: (the error's type, its message)}; the state stays as it was, a good checkpoint loads."""
    out = {}
    for case, options in cases.items():
        like = zerofn.shard(train_state(1, **options), stage=1)
        before = tree.tree_map(torch.clone, like)
        try:
            zerofn.load(folder / case, like=like)
        except Exception as error:
            out[case] = type(error).__name__, str(error)
        assert_same_trees(before, like)
    loaded = zerofn.load(folder / "good", like=zerofn.shard(train_state(1), stage=1))
    assert_same_trees(zerofn.unshard(loaded), train_state(7))
    return out


def edit_manifest(folder: Path, change) -> None:
    """Change it, with the checksum that it then should have."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    text = manifest._lines(data | {"sha256": manifest._ZEROS}) + "\n"
    path.write_text(text.replace(manifest._ZEROS, manifest._digest(text), 1))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def spoil(folder: Path) -> dict[str, str]:
    """Copies of the good checkpoint, each spoiled in one way; {name: what the message must say}."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder / "good", folder / name))

    (second,) = (p.name for p in (folder / "good").glob("rank-00001*"))
    (other,) = (folder / "better").glob("rank-00001*")
    path = copy("truncated") / second
    path.write_bytes(path.read_bytes()[:-100])
    (copy("no file") / second).unlink()
    flip(copy("damaged") / second, -5)
    shutil.copy(other, copy("mixed") / second)
    (copy("no manifest") / "manifest.json").unlink()
    (copy("bad manifest") / "manifest.json").write_text('{"format": "zerofn-check')
    edit_manifest(copy("newer"), lambda data: data.update(version=99))
    edit_manifest(copy("incomplete manifest"), lambda data: data.pop("files"))
    copy("other shape")
    copy("other name")
    (copy("empty") / "manifest.json").unlink()
    for file in (folder / "empty").iterdir():
        file.unlink()
    (folder / "a file").write_text("x")
    return {
        "truncated": "is truncated. Load another checkpoint",
        "no file": "rank-00001-of-00002.*safetensors is missing",
        "damaged": "is damaged",
        "mixed": "damaged, or from another save",
        "no manifest": "because the save was interrupted",
        "bad manifest": "manifest.json is damaged",
        "newer": "version 99",
        "incomplete manifest": "manifest.json is damaged: the JSON object has no 'files'",
        "other shape": r"'params.h.0.b' has shape \(301,\) in the file and \(17,\) in `like`",
        "other name": "has no leaf 'extra.average_of.average",
        "empty": "not a complete checkpoint",
        "a file": "is a file, but a checkpoint is a folder",
        "nowhere": r"does not exist.*The checkpoints in .* are \[",
    }


def test_each_raises_on_every_rank(ranks, tmp_path):
    ranks(2, save_one, tmp_path)
    expected = spoil(tmp_path)
    options = {"other shape": {"width": 17}, "other name": {"extra": "average_of"}}
    for errors in ranks(2, load_each, tmp_path, {case: options.get(case, {}) for case in expected}):
        assert set(errors) == set(expected)
        for case, (kind, message) in errors.items():
            assert kind == "CheckpointError", (case, kind, message)
            assert re.search(expected[case], message), (case, message)
            if case != "other name":
                assert str(tmp_path) in message


def no_file(kind: str, path: Path) -> None:
    """Put what is no regular file at a path, or a link to it."""
    path.unlink(missing_ok=True)
    target = path.with_name("target") if kind.startswith("link to ") else path
    match kind.removeprefix("link to "):
        case "pipe":
            os.mkfifo(target)
        case "socket":
            with contextlib.chdir(target.parent), socket.socket(socket.AF_UNIX) as opened:
                opened.bind(target.name)
        case "device":
            target = Path("/dev/zero")
        case "folder":
            target.mkdir()
        case "itself":
            target = path
    if target != path or kind in ("device", "link to itself"):
        path.symlink_to(target)


NO_FILES = ["pipe", "socket", "device", "folder", "link to pipe", "link to folder", "link to nothing", "link to itself"]


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("which", ["manifest.json", "rank-00000*", "zerofn-saving.json"])
def test_what_is_no_file_is_told_at_once(tmp_path, kind, which):
    state = zerofn.shard(train_state(7))
    zerofn.save(tmp_path / "a", state)
    (file,) = list((tmp_path / "a").glob(which)) or [tmp_path / "a" / which]
    no_file(kind, file)
    start = time.monotonic()
    if which == "zerofn-saving.json":  # which only saves read
        with pytest.raises(CheckpointError, match="zerofn-saving.json( was not written by ZeroFn|\\.$)"):
            zerofn.save(tmp_path / "a", state)
    else:
        with pytest.raises(CheckpointError):
            zerofn.load(tmp_path / "a", like=state)
        assert len(zerofn.verify(tmp_path / "a")) == 1
    assert time.monotonic() - start < 5


def spoiled(path: Path, at: int, bit: int) -> bytes:
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
    return whole


def test_every_bit_that_differs_is_told(tmp_path):
    """In any file, anywhere; half of them in the manifest and the headers."""
    zerofn.save(tmp_path / "a", train_state(7))
    files = sorted((tmp_path / "a").iterdir())
    chance, like = random.Random(0), train_state(1)
    for k in range(200):
        file = files[k % len(files)]
        size = file.stat().st_size
        at = chance.randrange(size if k % 4 < 2 else min(size, 3000))
        whole = spoiled(file, at, chance.randrange(8))
        with pytest.raises(CheckpointError):
            zerofn.load(tmp_path / "a", like=like)
        file.write_bytes(whole)
    assert_same_trees(zerofn.load(tmp_path / "a", like=like), train_state(7))


def tree_of(data: dict) -> dict:
    return next(t for t in data["trees"] if t["path"] == "params")


MANIFESTS = {
    "a file elsewhere": lambda data: rename_file(data, "../b/x.safetensors"),
    "an absolute file": lambda data: rename_file(data, "/etc/passwd"),
    "a file that is not listed": lambda data: tree_of(data).update(files=["x.safetensors"]),
    "more shards than files": lambda data: tree_of(data).update(num_shards=2),
    "no shards": lambda data: tree_of(data).update(num_shards=0, files=[]),
    "a unit beyond the end": lambda data: tree_of(data)["leaves"][0].update(unit=99),
    "a unit from the end": lambda data: tree_of(data)["leaves"][0].update(unit=-1),
    "an offset below zero": lambda data: tree_of(data)["leaves"][0].update(offset=-1),
    "an offset beyond the end": lambda data: tree_of(data)["leaves"][0].update(offset=1 << 40),
    "a shape that is too large": lambda data: tree_of(data)["leaves"][0].update(shape=[1 << 40]),
    "a shape below zero": lambda data: tree_of(data)["leaves"][0].update(shape=[-1]),
    "a shape of text": lambda data: tree_of(data)["leaves"][0].update(shape=["3"]),
    "a shape that is a number": lambda data: tree_of(data)["leaves"][0].update(shape=3),
    "a unit of text": lambda data: tree_of(data)["units"][0].update(size="3"),
    "a unit that is too large": lambda data: tree_of(data)["units"][0].update(size=1 << 40),
    "a tensor that is not there": lambda data: tree_of(data)["units"][0].update(tensor="x"),
    "an unknown dtype": lambda data: tree_of(data)["units"][0].update(dtype="F3"),
    "another dtype": lambda data: tree_of(data)["units"][0].update(dtype="F16"),
    "two leaves of one name": lambda data: tree_of(data)["leaves"].append(tree_of(data)["leaves"][0]),
    "trees that are no list": lambda data: data.update(trees=3),
    "files that are a list": lambda data: data.update(files=["x"]),
    "a size of text": lambda data: next(iter(data["files"].values())).update(nbytes="3"),
    "replicated leaves elsewhere": lambda data: data["replicated"][0].update(file="../x"),
    "replicated leaves that are not there": lambda data: data["replicated"][0].update(tensor="x"),
}


STRANGE = [
    None, -1, 2, 1 << 63, 10**30, "x", "", 1.5, [], {}, True, math.nan, math.inf, [None], "F99",
    "\ud800", [1, 2], [[0, [[0, 1]]]],
]  # fmt: skip


def places_in(x, at=()):
    """Every place of a JSON document, as the keys that lead there."""
    yield at
    for key in x if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ():
        yield from places_in(x[key], (*at, key))


def test_a_manifest_with_any_value_anywhere_is_right_or_told(tmp_path):
    """`CheckpointError`, or the values that were saved; never an error of Python, nor memory for what is not there."""
    saved = train_state(7)
    zerofn.save(tmp_path / "a", zerofn.shard(saved))
    good = (tmp_path / "a" / "manifest.json").read_text()
    places = [x for x in places_in(json.loads(good)) if x and x[-1] not in ("sha256", "offset")]
    chance, like = random.Random(0), zerofn.shard(train_state(1))
    told = 0
    for k in range(120):
        *above, last = chance.choice(places)
        value = chance.choice(STRANGE)

        def change(data, above=above, last=last, value=value, removed=k % 4 == 0):
            inside = functools.reduce(lambda x, key: x[key], above, data)
            if removed:
                del inside[last]
            else:
                inside[last] = value

        edit_manifest(tmp_path / "a", change)
        try:
            assert_same_trees(zerofn.unshard(zerofn.load(tmp_path / "a", like=like)), saved)
            reports.described(tmp_path / "a")
        except CheckpointError as error:
            told += "damaged: " in str(error)
        (tmp_path / "a" / "manifest.json").write_text(good)
    assert told > 60


def rename_file(data: dict, name: str) -> None:
    data["files"] = {name: next(iter(data["files"].values()))}
    for x in data["trees"]:
        x["files"] = [name]
    for x in data["replicated"]:
        x["file"] = name


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests_that_lie(tmp_path, case):
    """Their checksum is right: somebody has written them so."""
    zerofn.save(tmp_path / "a", zerofn.shard(train_state(7)))
    edit_manifest(tmp_path / "a", MANIFESTS[case])
    with pytest.raises(CheckpointError):
        zerofn.load(tmp_path / "a", like=train_state(1))


def load_what_differs(folder: Path) -> str:
    path = folder / str(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:  # two machines, and a path that is not shared
        real = loading.Checkpoint
        patch.setattr(loading, "Checkpoint", lambda *_: real(path))
        patch.setattr(loading, "digest_now", lambda _: "the same")
        patch.setattr(loading, "_PAUSE", 0.01)
        with pytest.raises(CheckpointError) as caught:
            zerofn.load(folder / "0", like=zerofn.shard(train_state(1), stage=3))
    return str(caught.value)


def test_ranks_that_see_different_checkpoints(ranks, tmp_path):
    for rank in range(2):
        zerofn.save(tmp_path / str(rank), train_state(7).replace(step=torch.tensor(10 + rank)))
    first, second = ranks(2, load_what_differs, tmp_path)
    for message in (first, second):
        assert "ranks see different checkpoints" in message and "step 10" in message and "step 11" in message


def test_saving_over_a_damaged_one(tmp_path):
    zerofn.save(tmp_path / "a", train_state(7))
    spoiled(tmp_path / "a" / "manifest.json", 400, 0)
    zerofn.save(tmp_path / "a", train_state(8))
    assert_same_trees(zerofn.load(tmp_path / "a", like=train_state(1)), train_state(8))
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_names_that_differ_offer_the_nearest(tmp_path):
    zerofn.save(tmp_path / "a", {"params": {"h.0.weight": torch.ones(3)}})
    words = r"no leaf 'params.h.0.weights'; the nearest name is 'params.h.0.weight'"
    with pytest.raises(CheckpointError, match=words):
        zerofn.load(tmp_path / "a", like={"params": {"h.0.weights": torch.ones(3)}})
    words = r"`like` has no leaf 'params.h.0.weight'.*The checkpoint has this leaf"
    with pytest.raises(CheckpointError, match=words):
        zerofn.load(tmp_path / "a", like={"params": {}})


def test_kinds_that_cannot_be_cast(tmp_path):
    zerofn.save(tmp_path / "a", {"x": torch.ones(3)})
    with pytest.raises(CheckpointError, match="'x' is torch.float32 in the file, which cannot be cast"):
        zerofn.load(tmp_path / "a", like={"x": torch.ones(3, dtype=torch.int64)})


@pytest.mark.parametrize(
    "state, words",
    [
        ({"a": {"b": "text"}}, r"leaf 'a.b' is a str"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, r"leaf 'a' has dtype torch.complex128.*view_as_real"),
        ({"a": torch.eye(3).to_sparse()}, r"leaf 'a' is a torch.sparse_coo tensor"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, r"two leaves have the name 'a.b'"),
        ({"a": torch.ones(2, device="meta")}, r"'a' is on the meta device"),
    ],
)
def test_states_that_cannot_be_saved(tmp_path, state, words):
    with pytest.raises((TypeError, ValueError), match=words):
        zerofn.save(tmp_path / "a", state)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        zerofn.save(tmp_path / "thesis", mixed_state())
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "x"


# --- ranks that do not do the same ---------------------------------------------------------------


def errors_of_save(folder: Path, case: str) -> str:
    rank = dist.get_rank()
    state = {"params": {"w": torch.ones(5000)}, "extra": {"mean": torch.ones(3)}}
    if case == "replicated":
        state["extra"]["mean"][1] = rank
    if case == "stage 0":
        state = zerofn.shard(state, stage=0)
        state["params"].shards[0][7] = rank
    if case == "structure" and rank:
        state["extra"]["more"] = torch.ones(3)
    if case == "bad leaf" and rank:
        state["extra"]["mean"] = "text"
    path = folder / (f"path{rank}" if case == "path" else "a")
    try:
        zerofn.save(path, state)
    except (ValueError, TypeError, CheckpointError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "case, words",
    [
        ("replicated", "replicated leaf 'extra.mean' differs between rank"),
        ("stage 0", "replicated leaf 'params.w' differs between rank"),
        ("structure", "ranks save different states"),
        ("path", "ranks save different states, or save to different paths"),
        ("bad leaf", "leaf 'extra.mean' is a str"),
    ],
)
def test_ranks_that_differ(ranks, tmp_path, case, words):
    for message in ranks(2, errors_of_save, tmp_path, case):
        assert words in message
    assert list(tmp_path.iterdir()) == []


def errors_of_load(folder: Path) -> list[str]:
    errors = []
    like = zerofn.shard(train_state(1), stage=3)
    for path, state in ((f"{folder}/{dist.get_rank()}", like), (folder / "good", [3, 4][: dist.get_rank() + 1])):
        try:
            zerofn.load(path, like=state)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_load_different_things(ranks, tmp_path):
    for errors in ranks(2, errors_of_load, tmp_path):
        assert len(errors) == 2
        assert all("ranks load different paths, or load into different layouts" in e for e in errors)
