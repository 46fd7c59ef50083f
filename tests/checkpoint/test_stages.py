"""States on the stages of a pipeline: saved with one placement and loaded with another, bit for bit."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.checkpoint.test_mesh import SHAPES, all_saved, load_all, plain, read_counted
from tests.support.same import assert_same_trees
from zerofn.checkpoint.file_sources import Checkpoint
from zerofn.checkpoint.reports import described, differences
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import Pipeline, equal, on_stages
from zerofn.job.agreement import agree
from zerofn.schedules import make

SLICED = {"h.0.up": 0, "h.1.down": 1}  # over `tensor`, along a dim


def stages_of(name, num):
    """The embedding is tied: it is on the first stage and on the last. A scalar lies on no stage."""
    if name == "emb":
        return {0, num - 1}
    return {min(num - 1, list(SHAPES).index(name) * num // len(SHAPES))}


def cuts_for(mesh, schedule):
    found = {}
    for name, shape in SHAPES.items():
        own = []
        if mesh.size("tensor") > 1 and name in SLICED:
            own.append(equal("tensor", SLICED[name], shape[SLICED[name]], mesh.size("tensor")))
        if mesh.size("pipe") > 1 and shape:
            placement = make(schedule, mesh.size("pipe"), 1).placement
            stages = stages_of(name, placement.num_stages)
            own.append(on_stages(Pipeline(placement, schedule), 0, shape[0], stages))
        found |= {name: tuple(own)} if own else {}
    return found or None


def on(sizes, stage, seed=None, schedule="1f1b", **options):
    """A state on a mesh; of zeros without a seed."""
    mesh = Mesh.make(**sizes)
    whole = plain(0 if seed is None else seed)
    if seed is None:
        whole = zerofn.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, whole)
    return zerofn.shard(whole, stage=stage, mesh=mesh, cuts=cuts_for(mesh, schedule), **options)


SAVES = {  # name: (ranks, mesh, stage, options)
    "p2": (2, {"pipe": 2}, 3, {}),
    "p2 v": (2, {"pipe": 2}, 0, {"schedule": "zbv"}),
    "p3": (3, {"pipe": 3}, 1, {}),
    "p2d2": (4, {"pipe": 2, "data": 2}, 3, {}),
    "p2t2": (4, {"pipe": 2, "tensor": 2}, 2, {"schedule": "interleaved"}),
    "p2r2 halves": (4, {"pipe": 2, "replicate": 2}, 3, {"precision": "bf16"}),
    "d2": (2, {"data": 2}, 1, {}),
}
LOADS = [  # ranks, mesh, stage, options, from which
    (1, {"data": 1}, 3, {}, [*SAVES]),
    pytest.param(2, {"pipe": 2}, 0, {}, ["p3", "p2 v", "p2d2", "d2"], marks=pytest.mark.whole),
    (2, {"pipe": 2}, 2, {"schedule": "interleaved"}, ["p2", "p2t2", "p2r2 halves"]),
    pytest.param(3, {"pipe": 3}, 3, {"precision": "bf16"}, ["p2", "p2t2", "d2"], marks=pytest.mark.whole),
    pytest.param(4, {"pipe": 2, "data": 2}, 1, {}, ["p2", "p2t2", "p3"], marks=pytest.mark.whole),
    pytest.param(4, {"pipe": 2, "tensor": 2}, 3, {"schedule": "zbv"}, [*SAVES], marks=pytest.mark.whole),
    pytest.param(4, {"pipe": 4}, 3, {}, [*SAVES], marks=pytest.mark.whole),
    pytest.param(4, {"tensor": 2, "data": 2}, 3, {}, ["p2t2", "p3", "p2 v"], marks=pytest.mark.whole),
]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    return all_saved(ranks, tmp_path_factory.mktemp("saves"), on, SAVES)


@pytest.mark.parametrize(("num_ranks", "sizes", "stage", "options", "names"), LOADS)
def test_any_placement_loads_what_any_other_has_saved(ranks, saved, num_ranks, sizes, stage, options, names):
    ranks(num_ranks, load_all, saved, on, sizes, stage, options, names)


def test_every_element_is_written_once_by_the_first_that_holds_it(saved):
    state = [x for x in zerofn.tree.leaves(plain(0)) if isinstance(x, torch.Tensor)]
    for name in SAVES:
        checkpoint = Checkpoint(saved / name)
        files = [checkpoint._files[file] for file in checkpoint.manifest.files]
        nbytes = sum(file._entries[x].nbytes for file in files for x in file.names)
        trees = [t for t in checkpoint.manifest.trees if t.path == "params"]
        first = [t for t in trees if "params.emb" in [leaf.name for leaf in t.leaves]]
        assert len(first) == 1 and first[0] is trees[0]
        assert nbytes == sum(x.nbytes for x in state) or "pipe" not in SAVES[name][1], name
        counted = dict.fromkeys(SHAPES, 0)
        for leaf in (leaf for t in trees for leaf in t.leaves):
            counted[leaf.name.removeprefix("params.")] += leaf.numel
        assert counted == {leaf: torch.Size(shape).numel() for leaf, shape in SHAPES.items()}
        assert all(leaf.numel for t in trees for leaf in t.leaves)
        checkpoint.close()


def test_checkpoints_are_compared_verified_and_exported_by_one_process(saved, tmp_path):
    assert not list(differences(saved / "p2 v", saved / "p3")) and not list(differences(saved / "d2", saved / "p2t2"))
    (file,) = zerofn.export(saved / "p2d2", tmp_path / "weights.safetensors")
    assert_same_trees(zerofn.load_safetensors(file, like=dict(plain(7).params)), dict(plain(7).params))
    assert zerofn.verify(saved / "p3") == []
    assert "9 leaves" in described(saved / "p2")


def beside_the_steps(folder):
    state = on({"pipe": 2}, 3, 7, "zbv")
    saving = zerofn.save(folder / "a", state, wait=False)
    params = zerofn.tree_map(torch.zeros_like, state.params)
    saving.wait()
    assert zerofn.verify(folder / "a") == []
    mixed = zerofn.load(folder / "a", like=state.replace(params=params), only="params")
    assert_same_trees(zerofn.unshard(mixed), plain(7))
    zerofn.save(folder / "b", {"weights": state.params})
    renamed = zerofn.load(folder / "b", like=params, rename=lambda name: name.removeprefix("weights."))
    assert_same_trees(zerofn.unshard(renamed), plain(7).params)
    checkpoints = zerofn.Checkpoints(folder / "run", every=1, signals=())
    checkpoints.after_step(checkpoints.restore_or(state), {})
    checkpoints.close()
    again = zerofn.Checkpoints(folder / "run", signals=()).restore_or(lambda: on({"pipe": 2}, 1))
    assert_same_trees(zerofn.unshard(again), plain(7))
    if dist.get_rank() == 0:
        zerofn.export(folder / "a", folder / "weights.safetensors")
    agree("exported", "")
    found = zerofn.load_safetensors(folder / "weights.safetensors", like=params)
    assert_same_trees(zerofn.unshard(found), dict(plain(7).params))
    found = zerofn.load_state_dict(dict(plain(7).params), like=params)
    assert_same_trees(zerofn.unshard(found), dict(plain(7).params))


def test_saves_behind_the_steps_parts_new_names_runs_and_weights(ranks, tmp_path):
    ranks(2, beside_the_steps, tmp_path)


def on_drives(folder):
    offload = zerofn.Offload(optimizer="nvme", path=folder)
    zerofn.save(folder / "a", on({"pipe": 2}, 3, 7, offload=offload))
    found = zerofn.load(folder / "a", like=on({"pipe": 2}, 1, schedule="zbv", offload=offload), donate=True)
    assert_same_trees(zerofn.unshard(found), plain(7))


def test_states_on_drives(ranks, tmp_path):
    ranks(2, on_drives, tmp_path)


def test_a_rank_reads_what_its_stages_have(ranks, saved):
    checkpoint = Checkpoint(saved / "p3")
    leaves = [leaf for tree in checkpoint.manifest.trees for leaf in tree.leaves]
    both = [leaf for leaf in leaves if leaf.name.endswith(("emb", "h.1.s"))]
    checkpoint.close()
    expected = sum(x.numel for x in leaves) + sum(x.numel for x in both)
    assert sum(ranks(2, read_counted, saved, on, {"pipe": 2}, "p3")) == expected


def kept(sizes, stage, **options):
    from zerofn.launch.payload import packed

    state = on(sizes, stage, 7, **options)
    here = zerofn.abstract(state)
    assert here.params.layout == state.params.layout
    return packed(here, "")


def taken(folder, stage, parcel):
    from zerofn.launch.payload import unpacked

    like = unpacked(parcel)
    assert like.params.spec.stage == stage and not any(x.cuts for x in like.params.layout.leaves)
    assert_same_trees(zerofn.unshard(zerofn.load(folder / "p3", like=like)), plain(7))


def test_an_abstract_state_has_whole_leaves_elsewhere(ranks, saved):
    for parcel in ranks(2, partial(kept), {"pipe": 2}, 1):
        ranks(1, taken, saved, 1, parcel)
