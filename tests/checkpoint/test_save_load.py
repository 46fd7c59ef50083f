"""What was saved is what is loaded, bit for bit, however either is laid out."""

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.checkpoint_states import mixed_state, train_state
from tests.support.same import assert_same_trees
from tests.support.some import some_of
from zerofn import tree
from zerofn.util.errors import CheckpointError

STAGES = (0, 1, 3)


def save_at(folder: Path, stages) -> None:
    for stage in stages:
        zerofn.save(folder / f"{dist.get_world_size()}-{stage}", zerofn.shard(train_state(7), stage=stage))


def load_at(folder: Path, names, stage: int, unit=None) -> None:
    like = zerofn.shard(train_state(1), stage=stage, unit=unit)
    before = tree.tree_map(torch.clone, like)
    for name in names:
        loaded = zerofn.load(folder / name, like=like)
        what = f"{name} loaded at stage {stage}"
        assert_same_trees(zerofn.unshard(loaded), train_state(7), what)
        assert_same_trees(zerofn.gather(loaded.params), train_state(7).params, what)
        assert (loaded.params.full is None) == (like.params.full is None)
    assert_same_trees(before, like)


def one_unit(name: str) -> str:
    return "all"


FEW, MORE = [(1, 3), (2, 1), (3, 2)], [(2, 0), (3, 3)]


@pytest.mark.part(readers=[FEW])
@pytest.mark.parametrize("readers", [FEW, MORE], ids=str)
def test_every_world_size_and_stage(ranks, tmp_path, readers):
    sizes = some_of((1, 2, 3), 1, 3)
    names = [f"{n}-{stage}" for n in sizes for stage in STAGES]
    for n in sizes:
        ranks(n, save_at, tmp_path, STAGES)
    for n, stage in readers:
        ranks(n, load_at, tmp_path, names, stage)
    ranks(2, load_at, tmp_path, names[-1:], 3, one_unit)
    for name in names:  # and without ranks, into a plain state
        loaded = zerofn.load(tmp_path / name, like=train_state(1))
        assert_same_trees(loaded, train_state(7))


def test_plain_state_into_shards(ranks, tmp_path):
    zerofn.save(tmp_path / "plain", train_state(7))
    ranks(3, load_at, tmp_path, ["plain"], 3)


def save_stage_0_and_3(folder: Path) -> None:
    save_at(folder, (0, 3))


def test_nothing_is_written_twice(ranks, tmp_path):
    ranks(3, save_stage_0_and_3, tmp_path)
    sizes = {name: [p.stat().st_size for p in sorted((tmp_path / name).glob("rank-*"))] for name in ("3-0", "3-3")}
    state_bytes = sum(x.numel() * x.element_size() for x in tree.leaves(train_state()))
    for each in sizes.values():
        assert len(each) == 3
        assert sum(each) < 1.1 * state_bytes + 3 * 50_000
    assert sizes["3-0"][1] == pytest.approx(sizes["3-3"][1], rel=0.01)


def test_containers_and_leaves_of_every_kind(tmp_path):
    zerofn.save(tmp_path / "a", mixed_state(7))
    like = mixed_state(1)
    like["numbers"] = [0, 0.0, False, None]
    loaded = zerofn.load(tmp_path / "a", like=like)
    assert_same_trees(loaded, mixed_state(7))
    assert type(loaded["pair"]).__name__ == "Moving" and type(loaded["td"]).__name__ == "TensorDict"
    assert like["numbers"] == [0, 0.0, False, None]


def test_a_bare_tree_of_shards(tmp_path):
    params = zerofn.shard(train_state(7)).params
    zerofn.save(tmp_path / "a", params)
    loaded = zerofn.load(tmp_path / "a", like=train_state(1).params)
    assert_same_trees(loaded, train_state(7).params)


def test_the_manifest_says_where_everything_is(tmp_path):
    state = train_state(7)
    zerofn.save(tmp_path / "a", zerofn.shard(state.replace(step=torch.tensor(12))))
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["step"] == 12 and manifest["world_size"] == 1 and manifest["version"] == 3
    assert len(manifest["sha256"]) == 64
    named = {"save", "job", "host", "pid", "started", "time", "program", "stored"}
    assert set(manifest["saved"]) == named
    paths = [t["path"] for t in manifest["trees"]]
    assert {"params", "opt_state.mu", "opt_state.nu", "extra.extra.average"} <= set(paths)
    params = manifest["trees"][paths.index("params")]
    leaf = next(x for x in params["leaves"] if x["name"] == "params.h.1.w")
    assert leaf["shape"] == [301, 300]

    # The library reads the files, and the numbers lie where the manifest says.
    from safetensors import safe_open

    unit = params["units"][leaf["unit"]]
    with safe_open(tmp_path / "a" / params["files"][0], framework="pt") as file:
        flat = file.get_slice(unit["tensor"])[leaf["offset"] : leaf["offset"] + 301 * 300]
    assert torch.equal(flat.view(301, 300), state.params["h.1.w"])


def test_a_checkpoint_of_version_1_still_loads(tmp_path):
    zerofn.save(tmp_path / "a", zerofn.shard(train_state(7)))
    manifest = tmp_path / "a" / "manifest.json"
    data = json.loads(manifest.read_text())
    for tree_saved in data["trees"]:
        tree_saved["num_pieces"] = tree_saved.pop("num_shards")
    manifest.write_text(json.dumps(data | {"version": 1}))
    assert_same_trees(zerofn.load(tmp_path / "a", like=train_state(1)), train_state(7))


# --- precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("saved, loaded", [("fp32", "fp16"), ("fp16", "fp32"), ("bf16", "fp16")])
def test_precisions(tmp_path, saved, loaded):
    state = zerofn.shard(train_state(7), precision=saved)
    zerofn.save(tmp_path / "a", state)
    like = zerofn.shard(train_state(1), precision=loaded)
    result = zerofn.load(tmp_path / "a", like=like)
    assert_same_trees(zerofn.unshard(result.params), train_state(7).params)
    assert_same_trees(zerofn.unshard(result.opt_state), train_state(7).opt_state)
    assert (result.loss_scale is None) == (loaded != "fp16")


def test_a_loss_scale_that_was_saved_is_loaded(tmp_path):
    state = zerofn.shard(train_state(7), precision="fp16")
    zerofn.save(tmp_path / "a", state.replace(loss_scale=zerofn.DynamicLossScale(loss_scale=8.0)))
    assert zerofn.load(tmp_path / "a", like=state).loss_scale.loss_scale == 8.0


def test_another_master_dtype_is_cast_and_said_once(tmp_path, caplog):
    zerofn.save(tmp_path / "a", zerofn.shard(train_state(7)))
    half = tree.tree_map(lambda x: x.bfloat16() if x.is_floating_point() else x, train_state(1))
    with caplog.at_level(logging.INFO, logger="zerofn"):
        loaded = zerofn.load(tmp_path / "a", like=zerofn.shard(half))
    expected = tree.tree_map(lambda x: x.bfloat16() if x.is_floating_point() else x, train_state(7))
    assert_same_trees(zerofn.unshard(loaded), expected)
    (line,) = [r.getMessage() for r in caplog.records if "cast" in r.getMessage()]
    assert "float32 -> bfloat16" in line


# --- what `like` is ----------------------------------------------------------------------------


def test_a_state_whose_memory_was_given_away_will_do(tmp_path):
    state = zerofn.shard(train_state(7))
    zerofn.save(tmp_path / "a", state)
    state.params.donate("gone")
    loaded = zerofn.load(tmp_path / "a", like=state)
    assert_same_trees(zerofn.unshard(loaded), train_state(7))


def memory_of(state):
    return [x.data_ptr() for x in (*state.params.parts, *state.opt_state.mu.parts)]


def read_into(folder: Path, stages, **tiers) -> None:
    """Into a donated state's memory, whatever it holds; its gathered copy is filled, too."""
    for stage in stages:
        like = zerofn.shard(train_state(1), stage=stage, **tiers)
        memory, params = memory_of(like), like.params
        loaded = zerofn.load(folder / "a", like=like, donate=True)
        assert memory_of(loaded) == memory, f"stage {stage}"
        assert_same_trees(zerofn.unshard(loaded), train_state(7), f"stage {stage}")
        computes = loaded.params.spec.precision.computes
        right = tree.tree_map(lambda x, to=computes: x.to(to(x.dtype)), train_state(7).params)
        assert_same_trees(zerofn.gather(loaded.params), right, f"stage {stage}")
        with pytest.raises(RuntimeError, match="donated to zerofn.load"):
            zerofn.gather(params)


def test_a_donated_state_is_read_into(ranks, tmp_path):
    zerofn.save(tmp_path / "a", train_state(7))
    read_into(tmp_path, (0, 3))
    for n, stages in some_of(((2, (0, 1, 2, 3)), (3, (2, 3))), (3, (2, 3))):
        ranks(n, read_into, tmp_path, stages)


def test_a_donated_state_in_two_halves_and_on_a_drive(tmp_path):
    zerofn.save(tmp_path / "a", train_state(7))
    read_into(tmp_path, (3,), precision="bf16")
    read_into(tmp_path, (3,), offload=zerofn.Offload(optimizer="nvme", path=tmp_path))


def test_one_memory_in_two_places_of_a_donated_state_is_read_into_once(tmp_path):
    saved = zerofn.shard(train_state(7))
    other = tree.tree_map(lambda x: x + 1, saved.params)
    zerofn.save(tmp_path / "a", {"params": saved.params, "average": other})
    like = zerofn.shard(train_state(1)).params
    loaded = zerofn.load(tmp_path / "a", like={"params": like, "average": like}, donate=True)
    assert_same_trees(zerofn.unshard(loaded["params"]), zerofn.unshard(saved.params))
    assert_same_trees(zerofn.unshard(loaded["average"]), zerofn.unshard(other))


def test_a_part_of_a_donated_state(tmp_path):
    zerofn.save(tmp_path / "a", zerofn.shard(train_state(7)))
    like = zerofn.shard(train_state(1))
    memory = memory_of(like)
    loaded = zerofn.load(tmp_path / "a", like=like, only="params", donate=True)
    assert memory_of(loaded) == memory
    assert_same_trees(zerofn.unshard(loaded).params, train_state(7).params)
    assert_same_trees(zerofn.unshard(loaded).opt_state, train_state(1).opt_state)


def failing(folder: Path) -> None:
    """A donated state is lost, on every rank, only when reading has begun."""
    state = zerofn.shard(train_state(1))
    with pytest.raises(CheckpointError):
        zerofn.load(folder / "no", like=state, donate=True)
    with pytest.raises(CheckpointError, match="has no"):
        zerofn.load(folder / "a", like={"params": state.params, "more": torch.ones(3)}, donate=True)
    assert_same_trees(zerofn.unshard(state), train_state(1))
    with pytest.raises(CheckpointError, match="is damaged"):
        zerofn.load(folder / "a", like=state, donate=True)
    with pytest.raises(RuntimeError, match="overwrite this state. Make the state again"):
        zerofn.unshard(state)


def test_a_donated_state_is_lost_if_reading_it_fails(ranks, tmp_path):
    zerofn.save(tmp_path / "a", zerofn.shard(train_state(7)))
    (file,) = (tmp_path / "a").glob("rank-*")
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    failing(tmp_path)
    ranks(2, failing, tmp_path)


def test_shapes_alone_will_do(tmp_path):
    zerofn.save(tmp_path / "a", train_state(7))
    like = tree.tree_map(lambda x: x.to("meta"), train_state(1))
    assert_same_trees(zerofn.load(tmp_path / "a", like=like), train_state(7))


def save_two_ways(folder: Path) -> None:
    """A mesh of two axes: shards that several ranks hold are written by one."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "data"))
    state = zerofn.shard(train_state(7), mesh=mesh)
    zerofn.save(folder / "a", state)
    loaded = zerofn.load(folder / "a", like=zerofn.shard(train_state(1), mesh=mesh))
    assert_same_trees(zerofn.unshard(loaded), train_state(7))


def test_replicas_are_written_once(ranks, tmp_path):
    ranks(4, save_two_ways, tmp_path)
    assert len(list((tmp_path / "a").glob("rank-*"))) == 2
