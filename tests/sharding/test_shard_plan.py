"""The policy of `shard`: what becomes of every leaf, without anything being allocated."""

import pytest
import torch

from zerofn import Precision, TrainState, optim, tree
from zerofn.comm.mesh import Axis, Mesh
from zerofn.geometry.layout import make_layout
from zerofn.offload.policy import Offload
from zerofn.ops.codecs import E4M3, E5M2, PLAIN, SIGNED, SPLIT
from zerofn.sharding.partition import Partition
from zerofn.sharding.precision import NAMED
from zerofn.sharding.shard_plan import ReplicatedPart, moment_storage, plan_state, public_dtype, storages_of
from zerofn.sharding.storage import StorageSpec

CPU, META = torch.device("cpu"), torch.device("meta")


def partition_of(stage=3, size=2, **options):
    return Partition.zero(Mesh((Axis("data", size),)), stage, **options).at(CPU)


def params():
    """Tensors without memory: a plan needs their shapes alone."""
    return {f"h.{k}.w": torch.empty(64, 64, device="meta") for k in range(3)}


def planned(state, *args, **kwargs):
    parts, treedef = plan_state(state, partition_of(*args, **kwargs))
    return dict(zip(tree.field_names(treedef), parts, strict=True))


def test_a_state_is_planned_without_memory():
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, moments="fp8"))
    parts = planned(TrainState.create(params=params(), tx=tx), precision=NAMED["bf16"])
    found = {
        name: {storage.codec for storage in part.storages} for name, part in parts.items() if hasattr(part, "storages")
    }
    assert found == {"params": {SPLIT}, "opt_state.1.mu": {E4M3}, "opt_state.1.nu": {E5M2}}
    assert [part.first for part in parts.values()] == sorted(part.first for part in parts.values())
    assert {name: part.spec.partition.codec for name, part in parts.items() if name in found} == {
        name: codec for name, (codec,) in found.items()
    }
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


def stored(dtype, partition, name="x"):
    """How the one shard of a unit of this dtype is stored."""
    (unit,) = make_layout({"w": torch.empty(64, device="meta")}, 2).units
    (storage,) = storages_of(name, [unit], [dtype], partition)
    return storage


def test_codecs():
    bf16, fp32, wide = partition_of(precision="bf16"), partition_of(), torch.float64
    assert [stored(torch.float32, x).codec for x in (bf16, bf16.beside(), fp32)] == [SPLIT, PLAIN, PLAIN]
    assert stored(wide, bf16) == StorageSpec(PLAIN, wide)  # which has no halves
    assert stored(torch.float32, fp32.beside(SIGNED)).codec == SIGNED
    with pytest.raises(
        ValueError, match="'mu' cannot be stored in 8-bit blocks: such moments hold float32, but the .* float64"
    ):
        stored(wide, fp32.beside(SIGNED), "mu")


def test_public_dtypes():
    half = torch.bfloat16
    assert public_dtype([half, torch.float32], {half}, Precision()) == torch.float32
    assert public_dtype([half], {half}, NAMED["bf16"]) == torch.float32  # the master's
    assert public_dtype([torch.float64], {half}, NAMED["bf16"]) == torch.float64


def test_tiers():
    def placed(partition):
        placement = stored(torch.float32, partition).placement
        return placement and (placement.tiers, placement.paths, placement.device)

    def on(**tiers):
        return Partition.zero(Mesh((Axis("data", 2),)), precision="bf16", offload=Offload(**tiers)).at(META)

    assert placed(partition_of(precision="bf16")) is None
    both = on(optimizer="nvme", params="cpu", path="/x")
    assert placed(both) == (("cpu", "nvme"), ("/x",), "meta") and placed(both.beside()) == (("nvme",), ("/x",), "meta")
    assert placed(on(optimizer="cpu")) == ((None, "cpu"), (), "meta")
    params = on(params="nvme", path="/x")
    assert placed(params) == (("nvme", None), ("/x",), "meta") and placed(params.beside()) is None
