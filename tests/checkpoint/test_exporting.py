"""What `export` writes is what safetensors and transformers read."""

import contextlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import zerofn
from tests.checkpoint.test_steps import at_change, in_fork
from tests.support.checkpoint_states import train_state
from tests.support.same import assert_same_trees, first_difference
from zerofn.checkpoint import CheckpointError, exporting


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def save_shards(path) -> None:
    zerofn.save(path, zerofn.shard(train_state(7), stage=3))


def test_one_file(ranks, tmp_path):
    ranks(3, save_shards, tmp_path / "a")
    assert zerofn.export(tmp_path / "a", tmp_path / "b" / "w.safetensors") == [tmp_path / "b" / "w.safetensors"]
    assert_same_trees(load_file(tmp_path / "b" / "w.safetensors"), train_state(7).params)
    assert names_in(tmp_path / "b") == ["w.safetensors", "w.safetensors.crc32.json"]


def test_several_files_and_back_to_one(tmp_path):
    zerofn.save(tmp_path / "a", train_state(7))
    files = zerofn.export(tmp_path / "a", tmp_path / "b", max_shard_size="400KB")
    assert len(files) > 1 and all(f.stat().st_size < 410_000 for f in files)
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    loaded = {}
    for file in files:
        loaded |= load_file(file)
    assert_same_trees(loaded, train_state(7).params)
    assert {n: (tmp_path / "b" / f) for n, f in index["weight_map"].items()}.keys() == loaded.keys()
    assert index["metadata"]["total_size"] == sum(x.numel() * x.element_size() for x in loaded.values())
    read = zerofn.load_safetensors(tmp_path / "b", like=train_state(1).params)
    assert_same_trees(read, train_state(7).params)

    theirs = tmp_path / "b" / "model-00001-of-00099.safetensors"
    theirs.touch()  # without our checksums beside it
    for size, end in (
        ("600KB", ["model.safetensors.index.json"]),
        (None, []),
        ("400KB", ["model.safetensors.index.json"]),
    ):
        files = zerofn.export(tmp_path / "a", tmp_path / "b", max_shard_size=size)
        made = [name for f in files for name in (f.name, f"{f.name}.crc32.json")]
        assert names_in(tmp_path / "b") == sorted([theirs.name, *made, *end])  # nothing of the one before


def test_part_dtype_and_rename(tmp_path):
    zerofn.save(tmp_path / "a", train_state(7))
    (file,) = zerofn.export(tmp_path / "a", tmp_path / "b", part="opt_state.mu", dtype=torch.bfloat16,
                            rename=lambda name: None if name.startswith("h.0") else "x." + name)  # fmt: skip
    mu = train_state(7).opt_state.mu
    expected = {f"x.{n}": t.bfloat16() for n, t in mu.items() if t is not None and not n.startswith("h.0")}
    assert_same_trees(load_file(file), expected)
    with pytest.raises(ValueError, match="no leaf 'param'.*The checkpoint has the parts .*'params'"):
        zerofn.export(tmp_path / "a", tmp_path / "b", part="param")
    with pytest.raises(ValueError, match="returns 'x' for two leaves"):
        zerofn.export(tmp_path / "a", tmp_path / "b", rename=lambda name: "x")


def test_a_tree_without_params_is_written_whole(tmp_path):
    zerofn.save(tmp_path / "a", {"w": torch.ones(3)})
    assert_same_trees(load_file(*zerofn.export(tmp_path / "a", tmp_path / "b")), {"w": torch.ones(3)})


def test_bad_arguments(tmp_path):
    zerofn.save(tmp_path / "a", {"w": torch.ones(3)})
    with pytest.raises(ValueError, match="'5 Giga' is not a size"):
        zerofn.export(tmp_path / "a", tmp_path / "b", max_shard_size="5 Giga")
    with pytest.raises(ValueError, match="several files need a folder"):
        zerofn.export(tmp_path / "a", tmp_path / "b.safetensors", max_shard_size=1000)
    with pytest.raises(CheckpointError, match="does not exist"):
        zerofn.export(tmp_path / "c", tmp_path / "b")


def test_a_failed_export_leaves_what_was_there(tmp_path, monkeypatch):
    zerofn.save(tmp_path / "a", {"w": torch.ones(3)})
    (file,) = zerofn.export(tmp_path / "a", tmp_path / "b")
    before = file.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        zerofn.export(tmp_path / "a", tmp_path / "b")
    assert file.read_bytes() == before and names_in(tmp_path / "b") == [file.name, f"{file.name}.crc32.json"]


def test_a_bit_that_differs_is_told(tmp_path):
    """Where an export has written: in the file's header, in its numbers, in its checksums."""
    zerofn.save(tmp_path / "a", train_state(7))
    (file,) = zerofn.export(tmp_path / "a", tmp_path / "b")
    like, chance = train_state(1).params, random.Random(0)
    for path in (file, file.with_name(f"{file.name}.crc32.json")):
        whole = path.read_bytes()
        for _ in range(60):
            at = chance.randrange(len(whole) if chance.random() < 0.5 else min(2000, len(whole)))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
            try:
                assert_same_trees(zerofn.load_safetensors(file, like=like), train_state(7).params)
                assert path != file  # a space more in the text of checksums
            except CheckpointError:
                pass
        path.write_bytes(whole)
    file.with_name(f"{file.name}.crc32.json").unlink()  # weights of others have none
    assert_same_trees(zerofn.load_safetensors(file, like=like), train_state(7).params)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.part(before=["400KB"], after=["300KB"])
@pytest.mark.parametrize("before, after", [("400KB", None), (None, "400KB"), ("400KB", "300KB"), (None, None)])
def test_a_killed_export_leaves_no_mixture(tmp_path, monkeypatch, before, after):
    """At every rename and removal: the old weights, the new ones, or a sentence."""
    zerofn.save(tmp_path / "old", train_state(7))
    zerofn.save(tmp_path / "new", train_state(8))
    like = train_state(1).params
    unlink, replace, found = Path.unlink, os.replace, set()
    for kill_at in range(40):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        zerofn.export(tmp_path / "old", tmp_path / "out", max_shard_size=before)
        left = [kill_at]

        def count(work, left=left):
            def counted(*args, **options):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return work(*args, **options)

            return counted

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", count(unlink))
            patch.setattr(exporting.os, "replace", count(replace))
            with contextlib.suppress(Killed):
                zerofn.export(tmp_path / "new", tmp_path / "out", max_shard_size=after)
        try:
            read = zerofn.load_safetensors(tmp_path / "out", like=like)
            (seed,) = (s for s in (7, 8) if not first_difference(read, train_state(s).params))
            found.add(seed)
        except CheckpointError:
            found.add("told")
        if left[0] > 0:
            break
    assert {7, 8} <= found and left[0] > 0


@pytest.mark.parametrize("size", [None, "20KB"])
def test_transformers_reads_it(tmp_path, size):
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    model = hf.GPT2LMHeadModel(config)
    state = zerofn.shard({"params": dict(model.named_parameters())})
    zerofn.save(tmp_path / "a", state)
    zerofn.export(tmp_path / "a", tmp_path / "b", max_shard_size=size)
    config.save_pretrained(tmp_path / "b")
    again = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "b")
    ids = torch.arange(8)[None]
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.whole
def test_what_a_killed_export_has_left_goes_with_the_next(tmp_path):
    """At any change of the folder it may be killed. What another one is writing stays."""
    zerofn.save(tmp_path / "a", train_state(7))
    number, code, left = 0, 9, 0
    while code == 9:
        number, path = number + 1, tmp_path / f"{number}"
        path.mkdir()
        code = in_fork(lambda number=number, path=path: (
            at_change(path, number, lambda: os._exit(9)), zerofn.export(tmp_path / "a", path, max_shard_size="900KB"),
        ))  # fmt: skip
        left += any(".zerofn-" in name for name in names_in(path))
        (path / "w.safetensors.zerofn-0123456789ab").symlink_to(tmp_path / "mine")
        with exporting._Fresh() as other:
            other.text(path / "other.safetensors", "being written")
            zerofn.export(tmp_path / "a", path)
            assert len(names_in(path)) == 4 and (path / "model.safetensors.crc32.json").exists()
        assert_same_trees(load_file(path / "model.safetensors"), train_state(7).params)
    assert code == 0 and number > 8 and left > 3
