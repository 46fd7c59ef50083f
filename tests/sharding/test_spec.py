"""Which elements of a unit each rank of a mesh has; and hpZ, in which shards are cut once more over replicas: the bits
of the same mesh without it, plain torch's values, less state, the same bytes.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.plain_sgd import trained_by_torch
from tests.support.same import assert_same_trees
from zerofn import optim
from zerofn.comm.axes import EXPERT
from zerofn.comm.mesh import Axis, Mesh
from zerofn.comm.transport import SentBytes
from zerofn.geometry.cuts import equal
from zerofn.geometry.layout import make_layout
from zerofn.graph.resident import resident
from zerofn.job.in_flight import pending
from zerofn.parallel import tensor
from zerofn.sharding.partition import Partition
from zerofn.sharding.spec import Spec
from zerofn.util.process import the

STEPS = 3
PLAN = {"0": "colwise", "2": "rowwise"}


def meshes(sizes):
    """The mesh of every rank of a machine that is not there."""
    for place in itertools.product(*map(range, sizes.values())):
        yield Mesh(tuple(Axis(name, n, k, f"fake {name}") for (name, n), k in zip(sizes.items(), place, strict=True)))


def specs(sizes, stage=3, hpz=False):
    """The spec of every rank, of whole leaves and of a unit of experts if there is such an axis."""
    cut = equal(EXPERT, 0, 4, sizes[EXPERT]) if EXPERT in sizes else None

    def slice_of(name, shape):
        return ((shape[0] // sizes[EXPERT], *shape[1:]), (cut,)) if cut and name == "experts" else (shape, ())

    params = {"dense": torch.zeros(9001, device="meta"), "experts": torch.zeros(4, 3000, device="meta")}
    for mesh in meshes(sizes):
        partition = Partition.zero(mesh, stage, hpz=hpz)
        axes = [partition.over(experts) for experts in (False, True)]
        options = {"axis": axes[0].name, "of_experts": axes[1].size, "slice_of": slice_of}
        yield Spec(make_layout(params, axes[0].size, **options), partition)


@pytest.mark.parametrize(
    ("sizes", "hpz"),
    [
        ({"data": 3}, False),
        ({"replicate": 2, "data": 3}, False),
        ({"replicate": 2, "data": 3}, True),
        ({"data": 2, "replicate": 3}, True),
        ({"data": 2, "expert": 2, "context": 2}, False),
        ({"expert": 2, "replicate": 2, "data": 2}, True),
        ({"expert": 4}, False),
    ],
    ids=str,
)
def test_shards_of_all_ranks_make_up_every_unit(sizes, hpz):
    found = {}
    for spec in specs(sizes, hpz=hpz):
        for unit in spec.layout.units:
            place = spec.mesh.axis(EXPERT).rank if unit.of_experts else 0
            found.setdefault((unit.name, place), []).append(spec.own_cut(unit))
    copies = 1 if hpz else sizes.get("replicate", 1)
    for cuts in found.values():
        distinct = sorted(set(cuts))
        assert all(cuts.count(cut) == copies for cut in distinct)
        assert distinct[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(distinct))
        assert len({b - a for a, b in distinct}) == 1
    dense = {name: len(set(cuts)) for (name, _), cuts in found.items()}
    ranks = torch.tensor(list(sizes.values())).prod().item() // copies
    assert max(dense.values()) == ranks
    if EXPERT in sizes:
        assert min(dense.values()) == ranks // sizes[EXPERT]


def test_the_copy_is_the_part_that_ranks_of_a_node_share():
    for spec in specs({"replicate": 2, "data": 3}, hpz=True):
        for unit in spec.layout.units:
            (start, stop), (a, b, size) = spec.own_cut(unit), spec.in_copy(unit)
            assert size * 3 == unit.size and b - a == stop - start
            assert start - a == spec.mesh.shards.rank * size  # where the copy begins in the unit
            assert spec.copied_over(unit).name == "replicate" and spec.steps(unit, from_copy=True)[0].name == "data"


def test_rows_of_sums_are_those_of_other_stages():
    """A rank that has everything puts the sums of a shard where the rank that has it alone does."""
    sizes = {"data": 2, "expert": 2}
    alone = {
        (spec.mesh.axis("data").rank, spec.mesh.axis(EXPERT).rank, unit.name): spec.own_cut(unit)
        for spec in specs(sizes)
        for unit in spec.layout.units
    }
    for spec in specs(sizes, stage=0):
        for unit in spec.layout.units:
            for start, stop, row, mine in spec.stored_shards(unit):
                there = alone[row, spec.mesh.axis(EXPERT).rank, unit.name]
                assert (there == (start, stop)) == mine


def build():
    """Units that are padded on most meshes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 130), nn.Tanh(), nn.Linear(130, 5)).double()


def deep():
    """With values that can be computed again."""
    torch.manual_seed(0)
    layers = [nn.Linear(70, 130), nn.Tanh(), nn.Sigmoid(), nn.Linear(130, 130), nn.Tanh(), nn.Linear(130, 5)]
    return nn.Sequential(*layers).double()


def even():
    """Units of whole shards for four ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 32 * 256), nn.Tanh(), nn.Linear(32 * 256, 5, bias=False))


def batches():
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS, 24, 75, generator=draw, dtype=torch.float64)
    return [{"x": each[:, :70], "y": each[:, 70:]} for each in x]


def plain():
    return trained_by_torch(build(), batches())


def unit_of(name):
    return name.split(".")[0]


def init_state(tx, make=build):
    return lambda: zerofn.TrainState.create(params=dict(make().named_parameters()), tx=tx)


def trained(mesh, tx, captured=True, num_microbatches=1, make=build, remat=None, **options):
    """(losses, parameters after all steps, the last state, the step)."""
    model = zerofn.skeleton(make)
    cuts = tensor(model, mesh, PLAN) if mesh.size("tensor") > 1 else None

    def loss_fn(params, batch):
        dtype = params["0.weight"].dtype
        y = functional_call(model, params, (batch["x"].to(dtype),))
        return (y.double() - batch["y"]).square().mean()

    def train_step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), num_microbatches)(batch)
        return state.apply_gradients(grads), loss

    state = zerofn.shard(init_state(tx, make), stage=3, mesh=mesh, cuts=cuts, unit=unit_of, **options)
    step, losses = zerofn.compile(train_step, remat=remat) if captured else train_step, []
    for batch in batches():
        own = {k: x.chunk(mesh.batch.size)[mesh.batch.rank] for k, x in batch.items()}
        state, loss = step(state, own)
        losses.append(loss.item())
    return losses, zerofn.unshard(state.params), state, step


RULES = {
    "sgd": (optim.sgd(0.1, 0.9), {}),
    "adamw": (optim.adamw(1e-2, weight_decay=0.1), {}),
    "halves": (optim.adamw(1e-2), {"precision": "bf16"}),
    "8 bit": (optim.adamw(1e-2, moments="8bit"), {"precision": "fp32"}),
    "drives": (optim.adamw(1e-2), {"offload": zerofn.Offload(optimizer="nvme")}),
    "remat": (optim.adamw(1e-2), {"remat": "full", "make": deep}),
    "clipped": (optim.chain(optim.clip_by_global_norm(0.3), optim.sgd(0.1, 0.9)), {}),
    "adafactor": (optim.adafactor(1e-2), {}),
    "muon": (optim.muon(1e-2), {}),
}


def hpz_and_without(sizes, name, captured, num_microbatches):
    mesh, (tx, options) = Mesh.make(**sizes), RULES[name]
    without = trained(mesh, tx, captured, num_microbatches, **options)
    hpz = trained(mesh, tx, captured, num_microbatches, hpz=True, **options)
    assert hpz[2].params.spec.partition.again and not without[2].params.spec.partition.again
    return without[:2], hpz[:2]


def assert_close(mine, ours):
    assert mine[0] == pytest.approx(ours[0], rel=1e-12)
    for key, x in ours[1].items():
        torch.testing.assert_close(mine[1][key], x, rtol=1e-12, atol=1e-14, msg=key)


@pytest.mark.part(name=["adamw"])
@pytest.mark.parametrize(
    ("sizes", "name", "captured", "num_microbatches"),
    [
        ({"replicate": 2, "data": 2}, "sgd", True, 1),
        ({"replicate": 2, "data": 2}, "sgd", False, 2),
        ({"data": 2, "replicate": 2}, "adamw", True, 2),
        ({"replicate": 2, "data": 2}, "halves", True, 1),
        pytest.param({"replicate": 2, "data": 2}, "halves", False, 1, marks=pytest.mark.whole),
        pytest.param({"replicate": 2, "data": 2}, "8 bit", True, 1, marks=pytest.mark.whole),
        ({"replicate": 2, "data": 2}, "drives", True, 1),
        pytest.param({"replicate": 2, "data": 2}, "remat", True, 1, marks=pytest.mark.whole),
        ({"replicate": 2, "data": 2}, "clipped", True, 1),
        ({"replicate": 2, "data": 2}, "adafactor", True, 1),
        ({"replicate": 2, "data": 2}, "muon", True, 1),
        pytest.param({"replicate": 3, "context": 2}, "sgd", True, 2, marks=pytest.mark.whole),
        pytest.param({"replicate": 2, "data": 2, "tensor": 2}, "clipped", True, 1, marks=pytest.mark.whole),
    ],
    ids=str,
)
def test_hpz_has_the_bits_of_the_mesh_without_it_and_the_values_of_plain_torch(
    ranks, sizes, name, captured, num_microbatches
):
    """Sums over whole leaves are cut where shards are, so they agree to rounding."""
    num_ranks = torch.tensor(list(sizes.values())).prod().item()
    for without, hpz in ranks(num_ranks, hpz_and_without, sizes, name, captured, num_microbatches, timeout=300):
        if name in ("clipped", "adafactor", "muon"):
            assert_close(hpz, without)
        else:
            assert hpz[0] == without[0]
            assert_same_trees(hpz[1], without[1], name)
        if name == "sgd":
            assert_close(hpz, plain())


def counted(sizes):
    """(moments, parameters, sent along), without hpZ and with it: what the plan says, compared with what is here."""
    mesh, tx = Mesh.make(**sizes), optim.adamw(1e-2)
    out = []
    for hpz in (False, True):
        *_, state, step = trained(mesh, tx, make=even, hpz=hpz)
        batch = {k: x.chunk(mesh.batch.size)[mesh.batch.rank] for k, x in batches()[0].items()}
        plan = step.lower(state, batch)
        moments = sum(x.nbytes for x in zerofn.tree.leaves(state.opt_state) if x.dim() == 1)
        numbers = sum(x.nbytes for x in zerofn.tree.leaves(state) if x.dim() == 0)
        params = sum(x.nbytes for x in state.params.copies or state.params.shards)
        there = resident(plan.program).device
        assert there["state"] + there["gathered"] == moments + params + numbers
        pending().wait_for_all()
        before = the(SentBytes).by_group.copy()
        step(state, batch)
        pending().wait_for_all()
        sent = {x.name: the(SentBytes).by_group[x.group] - before[x.group] for x in (*mesh.axes, mesh.batch)}
        assert plan.sent_along == sent
        out.append((moments, params, sent))
    return out


def test_state_shrinks_by_the_replicas_and_bytes_on_every_axis_stay(ranks):
    """But for the finite check: with hpZ a number a leaf goes along both axes, for the rows of both along the last."""
    sizes = [x.numel() for x in even().parameters()]
    total, numbers = 4 * sum(sizes), 4 * len(sizes)
    for (moments, params, without), (less, copies, hpz) in ranks(4, counted, {"replicate": 2, "data": 2}, timeout=300):
        assert moments == total and 2 * less == moments and copies == params == total // 2
        assert (without["data"], without["replicate"]) == (total + numbers, total // 2)
        assert (hpz["data"], hpz["replicate"]) == (total + 2 * numbers, total // 2 + numbers)


def several_ways():
    """A tree without its copy is gathered along both axes; moments never have one."""
    mesh = Mesh.make(replicate=2, data=2)
    state = zerofn.shard(init_state(optim.adamw(1e-2)), mesh=mesh, hpz=True, unit=unit_of)
    whole = dict(build().named_parameters())
    fresh = zerofn.tree_map(lambda x: x.clone(), state.params)
    assert fresh.copies is None and state.params.copies is not None
    for tree in (state.params, fresh):
        assert_same_trees(zerofn.gather(tree, axis="data x replicate"), whole)
        assert_same_trees(zerofn.unshard(tree), whole)
    noise = zerofn.normal_like(state.params, zerofn.random.key(3))
    plain_noise = zerofn.normal_like(zerofn.shard({"params": whole}, mesh=mesh)["params"], zerofn.random.key(3))
    assert_same_trees(zerofn.unshard(noise), zerofn.unshard(plain_noise))
    scattered = zerofn.scatter(whole, like=state.params)
    assert_same_trees(zerofn.unshard(scattered), whole)
    norms = zerofn.leaf_norms(state.params)
    for name, x in whole.items():
        torch.testing.assert_close(norms[name], x.norm(), rtol=1e-14, atol=0)
    with pytest.raises(ValueError, match="sharded over 'data x replicate', not over"):
        zerofn.gather(state.params, axis="data")


def test_trees_with_and_without_a_copy_are_gathered_alike(ranks):
    ranks(4, several_ways, timeout=300)


def without_effect():
    mesh = Mesh.make(replicate=2, data=2)
    whole = {"params": dict(build().named_parameters())}
    for stage in (0, 1, 2):
        with pytest.raises(ValueError, match=f"hpz=True has no effect at stage {stage}, .* Write stage=3"):
            zerofn.shard(whole, stage=stage, mesh=mesh, hpz=True)
    with pytest.raises(ValueError, match="no effect on a mesh of data=4: it shards the state over an axis 'replicate'"):
        zerofn.shard(whole, mesh=Mesh.make(data=4), hpz=True)
    with pytest.raises(
        ValueError, match=r"from one rank only, which is the same as stage=2 on zerofn.Mesh.make\(data=4\)"
    ):
        zerofn.shard(whole, mesh=Mesh.make(replicate=4), hpz=True)
    with pytest.raises(TypeError, match="hpz must be True or False, got 'cpu'"):
        zerofn.shard(whole, mesh=mesh, hpz="cpu")
    with pytest.raises(ValueError, match="params=...\\) has no effect with hpz"):
        zerofn.shard(whole, mesh=mesh, hpz=True, offload=zerofn.Offload(params="nvme"))


def test_hpz_without_effect_is_refused(ranks):
    ranks(4, without_effect, timeout=300)
