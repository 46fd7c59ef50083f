"""Checkpoints that DeepSpeed itself has written: benchmarks/interop/deepspeed_checkpoints.py made them."""

import os
import random
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

import zerofn
from benchmarks.interop.deepspeed_checkpoints import CASES, STEPS, Tiny
from tests.support.pipe_steps import in_two_stages
from tests.support.same import assert_same_trees
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import equal
from zerofn.interop.deepspeed_checkpoint import _Empty

ADAMW = optim.adamw(1e-2)
HERE = Path(__file__).parent / "deepspeed_checkpoints"


def unpacked(name, folder):
    with zipfile.ZipFile(HERE / f"{name}.zip") as packed:
        packed.extractall(folder)
    return folder


def like(stage, name="", **options):
    torch.manual_seed(7)
    module = Tiny()  # in which a layer is frozen
    if name.endswith("one-group"):
        module.requires_grad_(True)
    return zerofn.shard(state_of(module), stage=stage, **options)


def state_of(module, tx=ADAMW):
    return zerofn.TrainState.create(params=dict(module.named_parameters()), tx=tx)


def check(path, name, stage, only=None, **options):
    expected = torch.load(path / "expected.pt", weights_only=True)
    state = zerofn.unshard(zerofn.load_deepspeed(path, like=like(stage, name, **options), only=only))
    for key, value in expected.items():
        kind, _, leaf = key.partition(".")
        if kind != "params" and only:
            continue
        tree = {"params": state.params, "exp_avg": state.opt_state.mu, "exp_avg_sq": state.opt_state.nu}[kind]
        assert torch.equal(tree[leaf], value.view_as(tree[leaf])), (key, tree[leaf], value)
    assert len(expected) == 3 * (7 if name.endswith("one-group") else 5)
    torch.manual_seed(0)  # with which DeepSpeed's was made
    first = dict(Tiny().named_parameters())
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    for leaf in ("frozen.weight", "frozen.bias"):
        if not name.endswith("one-group"):
            assert torch.equal(state.params[leaf], first[leaf].to(dtype).float())
    counts = (int(state.step), int(state.opt_state.count), int(state.skipped))
    assert counts == ((0, 0, 0) if only else (STEPS, STEPS, 0))


@pytest.mark.parametrize("name", [x for x in CASES if x != "stage0-fp32"])
def test_masters_and_moments_are_deepspeeds_bit_for_bit(tmp_path, name):
    check(unpacked(name, tmp_path), name, 3)


def test_moments_by_number_need_one_group(tmp_path):
    path = unpacked("stage0-fp32", tmp_path)
    with pytest.raises(zerofn.CheckpointError, match=r"saves moments by number.*2 groups.*Pass only='params'"):
        zerofn.load_deepspeed(path, like=like(3))
    check(path, "stage0-fp32", 3, only="params")


@pytest.mark.part(world=[3])
@pytest.mark.parametrize("world", [2, 3])
def test_deepspeeds_checkpoints_load_at_other_ranks_and_stages(ranks, tmp_path, world):
    for name, stage in (("stage1-fp32", 1), ("stage3-bf16", 3), ("stage2-bf16", 0)):
        ranks(world, check, unpacked(name, tmp_path / name), name, stage)


def without_it_on_one(path, of_torch):
    there = path if dist.get_rank() == 0 else path / "elsewhere"
    load = zerofn.load_dcp if of_torch else zerofn.load_deepspeed
    with pytest.raises(zerofn.CheckpointError) as caught:
        load(there, like=like(3))
    return str(caught.value)


@pytest.mark.parametrize("of_torch", [False, True])
def test_a_checkpoint_that_one_rank_cannot_read_is_told_on_all(ranks, tmp_path, of_torch):
    path = unpacked("stage1-fp32", tmp_path / "ck")
    if of_torch:
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"model": dict(Tiny().named_parameters())}, checkpoint_id=path, no_dist=True)
    here, there = ranks(2, without_it_on_one, path, of_torch)
    assert "rank 1 failed: " in here and "elsewhere" in here and "elsewhere" in there


def check_slices(path, name, stage):
    cuts = {"embed.weight": equal("tensor", 0, 7, 2), "out.weight": equal("tensor", 1, 5, 2)}
    check(path, name, stage, mesh=Mesh.make(data=2, tensor=2), cuts=cuts)


def check_stages(path, name, stage):
    """The tied embedding lies on both stages."""
    stages = {"embed": (0, 1), "frozen": (0,), "norm": (0,), "out": (1,)}
    cuts = in_two_stages(dict(Tiny().named_parameters()), lambda name: stages[name.partition(".")[0]])
    check(path, name, stage, mesh=Mesh.make(pipe=2, data=2), cuts=cuts)


@pytest.mark.parametrize("check_cut", [check_slices, check_stages])
def test_slices_and_stages(ranks, tmp_path, check_cut):
    for name, stage in (("stage1-fp32", 1), ("stage3-bf16", 3)):
        ranks(4, check_cut, unpacked(name, tmp_path / name), name, stage)


def test_another_tier_keeps_the_same_bits(tmp_path):
    path = unpacked("stage3-fp32", tmp_path / "ck")
    offload = zerofn.Offload(optimizer="nvme", path=str(tmp_path))
    loaded = zerofn.load_deepspeed(path, like=like(3, offload=offload))
    assert_same_trees(zerofn.unshard(loaded), zerofn.unshard(zerofn.load_deepspeed(path, like=like(3))))


def test_the_file_latest_and_tags(tmp_path):
    path = unpacked("stage1-fp32", tmp_path)
    assert int(zerofn.load_deepspeed(path, like=like(3), tag="last").step) == STEPS
    assert int(zerofn.load_deepspeed(path / "last", like=like(3)).step) == STEPS
    (path / "latest").write_text("../elsewhere")
    with pytest.raises(zerofn.CheckpointError, match="which is not the name of a folder"):
        zerofn.load_deepspeed(path, like=like(3))
    with pytest.raises(
        zerofn.CheckpointError, match=r"older does not exist. Pass the folder that contains the file `latest`"
    ):
        zerofn.load_deepspeed(path, like=like(3), tag="older")


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/zerofn-was-here",)


def test_what_would_execute_something_is_named_and_not_read(tmp_path):
    path = unpacked("stage1-fp32", tmp_path)
    file = path / "last" / "mp_rank_00_model_states.pt"
    kept = torch.load(file, weights_only=True)
    torch.save({**kept, "client": Bomb()}, file)
    with pytest.raises(zerofn.CheckpointError, match=r"mp_rank_00_model_states.pt would call posix.system when it is"):
        zerofn.load_deepspeed(path, like=like(3))
    assert not os.path.exists("/tmp/zerofn-was-here")


def test_files_that_are_missing_damaged_or_of_another_model(tmp_path):
    path = unpacked("stage2-fp32", tmp_path / "a")
    (path / "last" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(zerofn.CheckpointError, match="has no file of rank 0"):
        zerofn.load_deepspeed(path, like=like(3))
    path = unpacked("stage2-fp32", tmp_path / "b")
    (path / "last" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(zerofn.CheckpointError, match=r"files of 1 ranks, but was saved by \[2, 2\]"):
        zerofn.load_deepspeed(path, like=like(3))
    path = unpacked("stage2-fp32", tmp_path / "c")
    file = path / "last" / "mp_rank_00_model_states.pt"
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(zerofn.CheckpointError, match=r"model_states.pt is damaged"):
        zerofn.load_deepspeed(path, like=like(3))
    path = unpacked("stage2-fp32", tmp_path / "d")
    shutil.copy(path / "last" / "mp_rank_00_model_states.pt", path / "last" / "mp_rank_01_model_states.pt")
    with pytest.raises(zerofn.CheckpointError, match="a model with tensor or pipeline parallelism"):
        zerofn.load_deepspeed(path, like=like(3))
    path = unpacked("stage2-fp32", tmp_path / "e")
    other = zerofn.shard(zerofn.TrainState.create(params={"w": torch.ones(3)}, tx=optim.adamw(1e-3)))
    with pytest.raises(zerofn.CheckpointError, match="has no leaf 'w'"):
        zerofn.load_deepspeed(path, like=other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(zerofn.CheckpointError, match=re.escape("has no *_model_states.pt, so it is not a checkpoint")):
        zerofn.load_deepspeed(tmp_path / "empty", like=like(3))


def test_another_optimizer_says_so(tmp_path):
    path = unpacked("stage2-fp32", tmp_path)
    with pytest.raises(zerofn.CheckpointError, match="`like` has 0 AdamStates. Make `like` with tx"):
        zerofn.load_deepspeed(path, like=zerofn.shard(state_of(Tiny(), optim.sgd(0.1))))


def test_the_other_name_of_a_tied_weight(tmp_path):
    path = unpacked("stage1-fp32", tmp_path)
    params = {("head.weight" if k == "embed.weight" else k): v for k, v in Tiny().named_parameters()}
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.adamw(1e-2)))
    loaded = zerofn.unshard(zerofn.load_deepspeed(path, like=state))
    expected = torch.load(path / "expected.pt", weights_only=True)
    assert torch.equal(loaded.params["head.weight"], expected["params.embed.weight"])
    assert torch.equal(loaded.opt_state.nu["head.weight"], expected["exp_avg_sq.embed.weight"])


STRANGE = [None, -1, 1 << 70, "x", [], {}, True, float("nan"), [None], {1: 2}, torch.ones(2, 2), torch.ones(0)]


def changed(value, chance):
    """A copy in which one value, somewhere, is another one or is gone."""
    if isinstance(value, dict | list) and value and chance.random() < 0.8:
        out = value.copy()
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value, dict) and chance.random() < 0.3:
            del out[key]
        else:
            out[key] = changed(value[key], chance)
        return out
    return chance.choice(STRANGE)


@pytest.mark.part(name=["stage0-fp32-one-group"])
@pytest.mark.parametrize("name", ["stage0-fp32-one-group", "stage1-fp32", "stage2-fp32", "stage3-fp32"])
def test_a_checkpoint_with_any_value_anywhere_is_read_or_told(tmp_path, name):
    """`CheckpointError`s, and never an error of Python's."""
    path, chance, told = unpacked(name, tmp_path), random.Random(0), 0
    state = like(1, name)
    for k in range(24):
        files = sorted(x for x in (path / "last").iterdir() if x.suffix == ".pt")
        file = files[k % len(files)]
        kept = file.read_bytes()
        with safe_globals([(_Empty, x) for x in get_unsafe_globals_in_checkpoint(file)]):
            value = torch.load(file, weights_only=True)
        inner = value.get("optimizer_state_dict", {})
        inner.pop("loss_scaler", None)
        if inner and k % 2:
            value["optimizer_state_dict"] = changed(inner, chance)
        else:
            value = changed(value, chance)
        torch.save(value, file)
        try:
            zerofn.load_deepspeed(path, like=state)
        except zerofn.CheckpointError:
            told += 1
        file.write_bytes(kept)
    assert told > 5
