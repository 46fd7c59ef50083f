"""The policy of `shard`: what becomes of every leaf, without anything being allocated."""

import pytest
import torch

from zerofn import Precision, TrainState, optim, tree
from zerofn.comm.mesh import Axis, Mesh
from zerofn.offload.policy import Offload
from zerofn.ops.codecs import E4M3, E5M2, PLAIN, SIGNED, SPLIT
from zerofn.sharding.partition import Partition
from zerofn.sharding.precision import NAMED
from zerofn.sharding.shard_plan import (
    ReplicatedPart,
    ShardPolicy,
    moment_storage,
    place,
    plan_state,
    public_dtype,
    storage_of,
)
from zerofn.sharding.storage import StorageSpec

CPU = torch.device("cpu")


def policy(stage=3, precision=None, offload=None, size=2):
    partition = Partition(Mesh((Axis("data", size),)))
    return ShardPolicy(stage, partition, precision or Precision(), None, None, offload or Offload(), CPU, {})


def params():
    """Tensors without memory: a plan needs their shapes alone."""
    return {f"h.{k}.w": torch.empty(64, 64, device="meta") for k in range(3)}


def planned(state, *args, **kwargs):
    parts, treedef = plan_state(state, policy(*args, **kwargs))
    return dict(zip(tree.field_names(treedef), parts, strict=True))


def test_a_state_is_planned_without_memory():
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, moments="fp8"))
    parts = planned(TrainState.create(params=params(), tx=tx), precision=NAMED["bf16"])
    found = {
        name: {storage.codec for storage in part.storages} for name, part in parts.items() if hasattr(part, "storages")
    }
    assert found == {"params": {SPLIT}, "opt_state.1.mu": {E4M3}, "opt_state.1.nu": {E5M2}}
    assert [part.first for part in parts.values()] == sorted(part.first for part in parts.values())
    assert parts["params"].spec.halves and not parts["opt_state.1.mu"].spec.halves
    assert parts["step"].on_host and isinstance(parts["opt_state.1.count"], ReplicatedPart)


def test_only_the_states_own_params_are_parameters():
    """Whether or not another entry is the same object."""
    own = params()
    for other in (own, params()):
        parts = planned({"params": own, "old": {"params": other}}, precision=NAMED["bf16"])
        assert [parts[name].is_params for name in ("params", "old.params")] == [True, False]
        assert parts["old.params"].storages[0] == StorageSpec(PLAIN, torch.float32)


def test_formats_are_found_by_path():
    a, b = optim.adamw(1e-3, moments="8bit"), optim.sgd(0.1, 0.9, moments="bf16")
    state = {"x": [a.init(params()), b.init(params())], "y": optim.adamw(1e-3).init(params())}
    found = moment_storage(state)
    assert {path: codec.name for path, (codec, _) in found.items()} == {
        ("x", 0, 1): "signed blocks",
        ("x", 0, 2): "unsigned blocks",
        ("x", 1, 1): "plain",
    }
    assert found["x", 1, 1] == (PLAIN, torch.bfloat16)


def test_storage_of():
    bf16, wide = NAMED["bf16"], torch.float32
    assert storage_of("params", wide, True, None, bf16).codec is SPLIT
    assert storage_of("mu", wide, False, None, bf16).codec is storage_of("params", wide, True, None, Precision()).codec
    assert storage_of("mu", torch.float64, False, (PLAIN, torch.bfloat16), bf16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="'mu' is to be kept in 8-bit blocks, which hold float32, and the .* float64"):
        storage_of("mu", torch.float64, False, (SIGNED, None), Precision())


def test_public_dtypes():
    half = torch.bfloat16
    assert public_dtype([half, torch.float32], {half}, Precision()) == torch.float32
    assert public_dtype([half], {half}, NAMED["bf16"]) == torch.float32  # the master's
    assert public_dtype([torch.float64], {half}, NAMED["bf16"]) == torch.float64


def test_places():
    layout = planned({"params": params()})["params"].spec.layout
    storages = [StorageSpec(SPLIT, torch.float32) for _ in layout.units]
    assert place(layout, storages, True, policy()) == storages
    there = place(layout, storages, True, policy(offload=Offload(optimizer="cpu")))
    assert {storage.placement.tiers for storage in there} == {(None, "cpu")}
    there = place(layout, storages, False, policy(offload=Offload(optimizer="cpu")))
    assert {storage.placement.tiers for storage in there} == {("cpu", "cpu")}
    there = place(layout, storages, True, policy(offload=Offload(optimizer="nvme", params="cpu", path="/x")))
    assert {(storage.placement.tiers, storage.placement.paths) for storage in there} == {(("cpu", "nvme"), ("/x",))}
