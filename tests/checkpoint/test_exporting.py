"""What `export` writes is what safetensors and transformers read."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import zerofn
from tests.support.checkpoint_states import train_state
from tests.support.same import assert_same_trees
from zerofn.checkpoint import CheckpointError, exporting


def save_shards(path) -> None:
    zerofn.save(path, zerofn.shard(train_state(7), stage=3))


def test_one_file(ranks, tmp_path):
    ranks(3, save_shards, tmp_path / "a")
    assert zerofn.export(tmp_path / "a", tmp_path / "b" / "w.safetensors") == [tmp_path / "b" / "w.safetensors"]
    assert_same_trees(load_file(tmp_path / "b" / "w.safetensors"), train_state(7).params)
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["w.safetensors"]


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

    assert [f.name for f in zerofn.export(tmp_path / "a", tmp_path / "b")] == ["model.safetensors"]
    assert not (tmp_path / "b" / "model.safetensors.index.json").exists()


def test_part_dtype_and_rename(tmp_path):
    zerofn.save(tmp_path / "a", train_state(7))
    (file,) = zerofn.export(tmp_path / "a", tmp_path / "b", part="opt_state.mu", dtype=torch.bfloat16,
                            rename=lambda name: None if name.startswith("h.0") else "x." + name)  # fmt: skip
    mu = train_state(7).opt_state.mu
    expected = {f"x.{n}": t.bfloat16() for n, t in mu.items() if t is not None and not n.startswith("h.0")}
    assert_same_trees(load_file(file), expected)
    with pytest.raises(ValueError, match="no leaf 'param'.*Its parts are .*'params'"):
        zerofn.export(tmp_path / "a", tmp_path / "b", part="param")
    with pytest.raises(ValueError, match="two leaves the name 'x'"):
        zerofn.export(tmp_path / "a", tmp_path / "b", rename=lambda name: "x")


def test_a_tree_without_params_is_written_whole(tmp_path):
    zerofn.save(tmp_path / "a", {"w": torch.ones(3)})
    assert_same_trees(load_file(*zerofn.export(tmp_path / "a", tmp_path / "b")), {"w": torch.ones(3)})


def test_bad_arguments(tmp_path):
    zerofn.save(tmp_path / "a", {"w": torch.ones(3)})
    with pytest.raises(ValueError, match="'5 Giga' is no size"):
        zerofn.export(tmp_path / "a", tmp_path / "b", max_shard_size="5 Giga")
    with pytest.raises(ValueError, match="several files need a folder"):
        zerofn.export(tmp_path / "a", tmp_path / "b.safetensors", max_shard_size=1000)
    with pytest.raises(CheckpointError, match="is not there"):
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
    assert file.read_bytes() == before and [p.name for p in (tmp_path / "b").iterdir()] == [file.name]


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
