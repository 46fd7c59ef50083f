"""torch's distributed checkpoints: what FSDP2 writes is read here, and what is written here FSDP2 reads."""

import dataclasses
import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerofn
from tests.support.pipe_steps import in_two_stages
from tests.support.same import assert_same_trees
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import equal
from zerofn.job.agreement import agree

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
RATE = 1e-2


def build(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))


def batch(step):
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def trained(module, steps=3):
    """A module and its AdamW after some steps on the same batch on all ranks."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    for k in range(steps):
        optimizer.zero_grad()
        module(batch(k)).square().mean().backward()
        optimizer.step()
    return module, optimizer


def like(stage=3, seed=9, **options):
    params = dict(build(seed).named_parameters())
    return zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.adamw(RATE)), stage=stage, **options)


def fsdp2_writes(path):
    module, optimizer = trained(build_sharded())
    weights, state = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=path)
    full = {k: v.full_tensor() for k, v in weights.items()}
    moments = {k: {m: v[m].full_tensor() for m in ("exp_avg", "exp_avg_sq")} for k, v in state["state"].items()}
    return full, moments


def build_sharded():
    module = build()
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def load(path, stage):
    return zerofn.unshard(zerofn.load_dcp(path, like=like(stage)))


def check(path, stage, full, moments):
    state = load(path, stage)
    assert_same_trees(state.params, full)
    assert_same_trees(state.opt_state.mu, {k: v["exp_avg"] for k, v in moments.items()})
    assert_same_trees(state.opt_state.nu, {k: v["exp_avg_sq"] for k, v in moments.items()})
    assert int(state.opt_state.count) == int(state.step) == 3


def test_what_fsdp2_has_written(ranks, tmp_path):
    full, moments = ranks(2, fsdp2_writes, tmp_path / "ck")[0]
    check(tmp_path / "ck", 3, full, moments)
    ranks(3, check, tmp_path / "ck", 3, full, moments)
    ranks(2, check, tmp_path / "ck", 1, full, moments)


def in_slices():
    cuts = {
        "0.weight": equal("tensor", 0, 7, 2),
        "0.bias": equal("tensor", 0, 7, 2),
        "2.weight": equal("tensor", 1, 7, 2),
    }
    return like(1, mesh=Mesh.make(tensor=2), cuts=cuts)


def in_stages():
    cuts = in_two_stages(dict(build().named_parameters()), lambda name: [int(name[0]) // 2])
    return like(3, mesh=Mesh.make(pipe=2), cuts=cuts)


def there_and_back(path, full, moments, make_like):
    """Load what FSDP2 has written in slices or stages, and write it again."""
    state = zerofn.load_dcp(path, like=make_like())
    whole = zerofn.unshard(state)
    assert_same_trees(whole.params, full)
    assert_same_trees(whole.opt_state.mu, {k: v["exp_avg"] for k, v in moments.items()})
    zerofn.save(path.parent / "ours", state)
    agree("saved", "")
    if dist.get_rank() == 0:
        zerofn.export_dcp(path.parent / "ours", path.parent / "theirs")
    agree("exported", "")


@pytest.mark.part(make_like=[in_stages])
@pytest.mark.parametrize("make_like", [in_slices, in_stages])
def test_slices_and_stages(ranks, tmp_path, make_like):
    full, moments = ranks(2, fsdp2_writes, tmp_path / "ck")[0]
    ranks(2, there_and_back, tmp_path / "ck", full, moments, make_like)
    check(tmp_path / "theirs", 3, full, moments)


def fsdp2_reads(path):
    module = build_sharded()
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    trained_once = module(batch(0)).square().mean()
    trained_once.backward()
    optimizer.step()  # so that it has a state to load into
    weights, state = get_state_dict(module, optimizer)
    held = {"model": weights, "optim": {"state": state["state"]}}
    dcp.load(held, checkpoint_id=path)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict={**state, **held["optim"]})
    optimizer.zero_grad()
    module(batch(3)).square().mean().backward()
    optimizer.step()
    return {k: v.full_tensor() for k, v in module.state_dict().items()}


def test_what_fsdp2_reads_goes_on_as_plain_torch(ranks, tmp_path):
    """A state of ZeroFn's, exported, and one more step by FSDP2: the four steps of plain torch."""
    module, optimizer = trained(build())
    state = zerofn.load_state_dict(dict(module.named_parameters()), like=like().params)
    moments = {k: optimizer.state[p] for k, p in module.named_parameters()}
    adam = optim.AdamState(
        count=torch.tensor(3, dtype=like().opt_state.count.dtype),
        mu=zerofn.load_state_dict({k: v["exp_avg"] for k, v in moments.items()}, like=like().opt_state.mu),
        nu=zerofn.load_state_dict({k: v["exp_avg_sq"] for k, v in moments.items()}, like=like().opt_state.nu),
    )
    zerofn.save(tmp_path / "ours", dataclasses.replace(like(), params=state, opt_state=adam))
    zerofn.export_dcp(tmp_path / "ours", tmp_path / "theirs")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["ours", "theirs"]
    expected = dict(trained(build(), 4)[0].named_parameters())
    for found in ranks(2, fsdp2_reads, tmp_path / "theirs"):
        for name, x in found.items():
            torch.testing.assert_close(x, expected[name].detach(), rtol=1e-6, atol=1e-7)
    again = zerofn.load_dcp(tmp_path / "theirs", like=like())
    assert_same_trees(zerofn.unshard(again.params), dict(module.named_parameters()))
    assert_same_trees(zerofn.unshard(again.opt_state.nu), {k: v["exp_avg_sq"] for k, v in moments.items()})


def test_parameters_alone(tmp_path):
    dcp.save({"state": {"net": build(3).state_dict()}}, checkpoint_id=tmp_path / "ck", no_dist=True)
    with pytest.raises(zerofn.CheckpointError, match=r"has no '0.bias.exp_avg', with any prefix.*only='params'"):
        zerofn.load_dcp(tmp_path / "ck", like=like())
    state = zerofn.load_dcp(tmp_path / "ck", like=like(), only="params")
    assert_same_trees(zerofn.unshard(state.params), dict(build(3).named_parameters()))


def test_bf16_and_another_dtype(tmp_path):
    weights = {k: v.bfloat16() for k, v in build(3).state_dict().items()}
    dcp.save(weights, checkpoint_id=tmp_path / "ck", no_dist=True)
    state = zerofn.load_dcp(tmp_path / "ck", like=like(precision="bf16"), only="params")
    assert_same_trees(zerofn.unshard(state.params), {k: v.float() for k, v in weights.items()})


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/zerofn-was-here",)


def test_metadata_that_would_execute_something(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "ck", no_dist=True)
    (tmp_path / "ck" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(zerofn.CheckpointError, match=r"the metadata would call posix.system when it is unpickled"):
        zerofn.load_dcp(tmp_path / "ck", like=like())
    assert not os.path.exists("/tmp/zerofn-was-here")


def test_what_is_missing_damaged_or_of_another_model(tmp_path):
    with pytest.raises(zerofn.CheckpointError, match=r"\.metadata does not exist. Pass the folder"):
        zerofn.load_dcp(tmp_path, like=like())
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "ck", no_dist=True)
    with pytest.raises(zerofn.CheckpointError, match=r"has no '0.bias', with any prefix; its tensors are w"):
        zerofn.load_dcp(tmp_path / "ck", like=like())
    data = next((tmp_path / "ck").glob("*.distcp"))
    data.rename(tmp_path / "moved")
    with pytest.raises(zerofn.CheckpointError, match=r"distcp is missing, or outside the folder"):
        zerofn.load_dcp(tmp_path / "ck", like=like())
    (tmp_path / "ck" / ".metadata").write_bytes(b"nothing")
    with pytest.raises(zerofn.CheckpointError, match=r"\.metadata is damaged"):
        zerofn.load_dcp(tmp_path / "ck", like=like())
    with pytest.raises(zerofn.CheckpointError, match="export_dcp: .* has no entry 'params'"):
        zerofn.save(tmp_path / "bare", {"w": torch.ones(3)})
        zerofn.export_dcp(tmp_path / "bare", tmp_path / "out")


def lies(path, change):
    """Let the metadata say something else."""
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with open(path / ".metadata", "wb") as file:
        pickle.dump(metadata, file)


def tensor_of(metadata):
    return metadata.state_dict_metadata["0.weight"]


def place_of(metadata):
    return next(x for index, x in metadata.storage_data.items() if index.fqn == "0.weight")


LIES = {
    "a huge shape": (lambda m: setattr(tensor_of(m), "size", torch.Size([1 << 20, 1 << 20])), "'0.weight' has shape"),
    "a negative shape": (lambda m: setattr(tensor_of(m), "size", (-1, 5)), "must be whole numbers of 0"),
    "a shape that is none": (lambda m: setattr(tensor_of(m), "size", "x"), "shape or offsets of .*, got 'x'"),
    "a dtype that is none": (lambda m: setattr(tensor_of(m).properties, "dtype", 5), "has the dtype 5"),
    "a chunk outside": (lambda m: setattr(tensor_of(m), "size", torch.Size([2, 5])), "outside this shape"),
    "a place outside": (lambda m: setattr(place_of(m), "offset", 1 << 40), "which has only"),
    "a place that is none": (lambda m: setattr(place_of(m), "length", None), "is damaged"),
    "another place": (lambda m: setattr(place_of(m), "offset", 1), "'0.weight'"),
    "no tensors": (lambda m: setattr(m, "state_dict_metadata", None), "its dict of tensors"),
    "no places": (lambda m: setattr(m, "storage_data", [1]), "its dict of their places"),
    "a folder elsewhere": (lambda m: setattr(place_of(m), "relative_path", "../x"), "outside the folder"),
    "an extension": (lambda m: setattr(place_of(m), "transform_descriptors", ["zstd"]), "Save it without .*extensions"),
}


@pytest.mark.parametrize("case", LIES)
def test_metadata_that_lies(tmp_path, case):
    dcp.save(dict(build().named_parameters()), checkpoint_id=tmp_path)
    change, words = LIES[case]
    lies(tmp_path, change)
    with pytest.raises(zerofn.CheckpointError, match=words):
        zerofn.load_dcp(tmp_path, like=like(), only="params")


def test_a_damaged_file_is_an_ordinary_error(tmp_path):
    """torch raises what is no `Exception`."""
    dcp.save(dict(build().named_parameters()), checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    data = file.read_bytes()
    for damaged in (data[: len(data) // 2], b"", bytes(len(data)), data.replace(b"data.pkl", b"data.pxl")):
        file.write_bytes(damaged)
        try:
            zerofn.load_dcp(tmp_path, like=like(), only="params")
        except Exception as error:
            assert isinstance(error, zerofn.CheckpointError), error
        else:
            raise AssertionError("a damaged file was read")
