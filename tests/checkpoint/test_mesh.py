"""States in slices: saved on one mesh and loaded on another, bit for bit."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

import zerofn
from benchmarks.mesh.float64_models import build, in_float64
from benchmarks.mesh.training import assert_same_training, batches
from benchmarks.mesh.training import plain as plain_torch
from tests.support.checkpoint_states import draw
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from zerofn import optim
from zerofn.checkpoint.file_sources import Checkpoint
from zerofn.checkpoint.reports import described, differences
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import Cut, equal
from zerofn.job.agreement import agree
from zerofn.parallel import tensor

SHAPES = {
    "emb": (70, 100),
    "h.0.up": (301, 300),
    "h.0.b": (301,),
    "h.0.packed": (36, 50),
    "h.0.keys": (32, 17),
    "h.1.down": (300, 301),
    "h.1.norm": (301,),
    "h.1.experts": (3, 10, 7),
    "h.1.s": (),
}


def cuts_for(size):
    """Rows, columns, uneven ones, several matrices in one leaf, heads that ranks share, and slices of no element."""
    if size == 1:
        return None
    shared = equal("tensor", 0, 32, size, unit=16 if size % 2 == 0 else 8)
    return {
        "emb": equal("tensor", 0, 70, size),
        "h.0.up": equal("tensor", 0, 301, size),
        "h.0.b": equal("tensor", 0, 301, size),
        "h.0.packed": equal("tensor", 0, 36, size, parts=3),
        "h.0.keys": shared,
        "h.1.down": equal("tensor", 1, 301, size),
        "h.1.experts": Cut("tensor", 1, 10, (((2, 5),), ((0, 2), (5, 10)), *[((10, 10),)] * (size - 2))),
    }


def plain(seed, dtype=torch.float32):
    params = {name: torch.empty(shape, dtype=dtype) for name, shape in SHAPES.items()}
    state = zerofn.TrainState.create(
        params=params, tx=optim.adamw(1e-3), frozen=lambda name: name == "emb", extra={"ema": params}
    )
    return draw(state.replace(step=torch.tensor(0)), seed)


def on(sizes, stage, seed=None, **options):
    """A state on a mesh; of zeros without a seed."""
    mesh = Mesh.make(**sizes)
    whole = plain(0 if seed is None else seed)
    whole = (
        zerofn.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x, whole)
        if seed is None
        else whole
    )
    return zerofn.shard(whole, stage=stage, mesh=mesh, cuts=cuts_for(mesh.size("tensor")), **options)


SAVES = {  # name: (ranks, mesh, stage, options)
    "t2": (2, {"tensor": 2}, 3, {}),
    "t3": (3, {"tensor": 3}, 0, {}),
    "d2": (2, {"data": 2}, 1, {}),
    "d2t2": (4, {"data": 2, "tensor": 2}, 3, {}),
    "t2r2": (4, {"tensor": 2, "replicate": 2}, 2, {}),
    "t4": (4, {"tensor": 4}, 1, {}),
    "c2d2": (4, {"data": 2, "context": 2}, 3, {}),
    "r2d2 hpz": (4, {"replicate": 2, "data": 2}, 3, {"hpz": True}),
    "d2r2 hpz halves": (4, {"data": 2, "replicate": 2}, 3, {"hpz": True, "precision": "bf16"}),
    "t3d1 halves": (3, {"data": 1, "tensor": 3}, 3, {"precision": "bf16"}),
}
LOADS = [  # ranks, mesh, stage, options, from which
    (1, {"data": 1}, 3, {}, ["t2", "t3", "d2t2", "t2r2", "t4", "t3d1 halves", "r2d2 hpz"]),
    (2, {"tensor": 2}, 0, {}, ["t3", "d2", "t2r2", "d2r2 hpz halves"]),
    pytest.param(3, {"tensor": 3}, 3, {"precision": "bf16"}, ["t3", "d2t2", "t4"], marks=pytest.mark.whole),
    pytest.param(3, {"data": 3}, 2, {}, ["t2", "t4"], marks=pytest.mark.whole),
    pytest.param(4, {"tensor": 2, "data": 2}, 1, {}, ["t2", "d2", "d2t2"], marks=pytest.mark.whole),
    pytest.param(4, {"replicate": 2, "tensor": 2}, 3, {}, ["t4", "t3"], marks=pytest.mark.whole),
    pytest.param(4, {"tensor": 4}, 2, {}, ["d2t2", "t2"], marks=pytest.mark.whole),
    pytest.param(4, {"context": 2, "tensor": 2}, 1, {}, ["t3", "c2d2"], marks=pytest.mark.whole),
    (4, {"replicate": 2, "data": 2}, 3, {"hpz": True}, ["t2r2", "d2r2 hpz halves", "r2d2 hpz", "d2"]),
    pytest.param(
        4,
        {"data": 2, "replicate": 2},
        3,
        {"hpz": True, "precision": "bf16"},
        ["r2d2 hpz", "t3"],
        marks=pytest.mark.whole,
    ),
    pytest.param(4, {"replicate": 2, "data": 2}, 3, {}, ["r2d2 hpz", "d2r2 hpz halves"], marks=pytest.mark.whole),
]


def save_all(folder, on, saves, num_ranks):
    for name, (count, sizes, stage, options) in saves.items():
        if count == num_ranks:
            zerofn.save(folder / name, on(sizes, stage, 7, **options))


def all_saved(ranks, folder, on, saves):
    """A folder with a checkpoint of one state for each of `saves`."""
    for num_ranks in (2, 3, 4):
        ranks(num_ranks, save_all, folder, on, saves, num_ranks)
    return folder


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    return all_saved(ranks, tmp_path_factory.mktemp("saves"), on, SAVES)


def load_all(folder, on, sizes, stage, options, names):
    for name in names:
        like = on(sizes, stage, **options)
        found = zerofn.load(folder / name, like=like, donate=name == names[-1])
        assert_same_trees(zerofn.unshard(found), plain(7), f"{name} on {sizes} at stage {stage}")


@pytest.mark.parametrize(("num_ranks", "sizes", "stage", "options", "names"), LOADS)
def test_any_mesh_loads_what_any_other_has_saved(ranks, saved, num_ranks, sizes, stage, options, names):
    ranks(num_ranks, load_all, saved, on, sizes, stage, options, names)


def test_files_hold_every_element_once_and_the_manifest_says_where(saved):
    for name in SAVES:
        checkpoint = Checkpoint(saved / name)
        manifest = json.loads((saved / name / "manifest.json").read_text())
        assert manifest["version"] == (4 if "tensor" in SAVES[name][1] else 3)
        params = [t for t in manifest["trees"] if t["path"] == "params"]
        assert len(params) == SAVES[name][1].get("tensor", 1)
        elements = dict.fromkeys(SHAPES, 0)
        for leaf in (leaf for t in checkpoint.manifest.trees if t.path == "params" for leaf in t.leaves):
            assert leaf.shape == SHAPES[leaf.name.removeprefix("params.")]
            elements[leaf.name.removeprefix("params.")] += leaf.numel
        assert elements == {leaf: torch.Size(shape).numel() for leaf, shape in SHAPES.items()}, name
        checkpoint.close()


def test_slices_are_written_without_padding_and_without_repeats(saved):
    """Whole leaves are in the files of one slice alone, so all files together have the state's bytes."""
    sizes = {}
    for name in ("t3", "t4", "t2"):
        checkpoint = Checkpoint(saved / name)
        files = [checkpoint._files[file] for file in checkpoint.manifest.files]
        sizes[name] = sum(file._entries[x].nbytes for file in files for x in file.names)
        checkpoint.close()
    state = [x for x in zerofn.tree.leaves(plain(0)) if isinstance(x, torch.Tensor)]
    assert set(sizes.values()) == {sum(x.nbytes for x in state)}


def test_checkpoints_of_meshes_are_compared_and_exported_by_one_process(saved, tmp_path):
    whole = plain(7)
    assert not list(differences(saved / "t3", saved / "d2t2")) and not list(differences(saved / "d2", saved / "t4"))
    (file,) = zerofn.export(saved / "t4", tmp_path / "weights.safetensors")
    found = zerofn.load_safetensors(file, like=dict(whole.params))
    assert_same_trees(found, dict(whole.params))
    assert zerofn.verify(saved / "t2r2") == []
    assert "7 of them in slices" in described(saved / "d2t2") and "slices" not in described(saved / "d2")


def read_counted(folder, on, sizes, name):
    """How many elements this rank reads of what is sharded."""
    like, count = on(sizes, 3), 0
    read = Checkpoint._sharded

    def counted(self, tree, leaf, start, into):
        nonlocal count
        count += into.numel()
        read(self, tree, leaf, start, into)

    Checkpoint._sharded = counted
    try:
        found = zerofn.load(folder / name, like=like)
    finally:
        Checkpoint._sharded = read
    assert_same_trees(zerofn.unshard(found), plain(7))
    return count


def test_a_rank_reads_only_what_it_keeps(ranks, saved):
    checkpoint = Checkpoint(saved / "d2t2")
    leaves = [leaf for tree in checkpoint.manifest.trees for leaf in tree.leaves]
    whole, uncut = (sum(x.numel for x in leaves if not (one and x.region)) for one in (False, True))
    checkpoint.close()
    same = ranks(4, read_counted, saved, on, {"data": 2, "tensor": 2}, "d2t2")
    assert sum(same) == whole + uncut  # whole leaves are needed by the ranks of both slices
    other = ranks(3, read_counted, saved, on, {"data": 3}, "t3")
    assert whole <= sum(other) < 1.001 * whole  # with what lies between two intervals of a slice
    columns = ranks(2, read_counted, saved, on, {"tensor": 2}, "d2")
    both = sum(x.numel for x in leaves if x.region and x.region[0][0] == 1)  # of columns, with those between
    assert whole + uncut < sum(columns) <= whole + uncut + both


def beside_the_steps(folder):
    state = on({"data": 2, "tensor": 2}, 3, 7)
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
    again = zerofn.Checkpoints(folder / "run", signals=()).restore_or(lambda: on({"tensor": 4}, 1))
    assert_same_trees(zerofn.unshard(again), plain(7))


@pytest.mark.whole
def test_saves_behind_the_steps_parts_new_names_and_runs(ranks, tmp_path):
    ranks(4, beside_the_steps, tmp_path)


def plain_weights(folder, sizes):
    """Weights that one process has written, and a state dict."""
    like, whole = on(sizes, 2), dict(plain(7).params)
    if dist.get_rank() == 0:
        zerofn.export(folder / "d2", folder / "weights", max_shard_size="300KB")
    agree("exported", "")
    found = zerofn.load_safetensors(folder / "weights", like=like.params)
    assert_same_trees(zerofn.unshard(found), whole)
    found = zerofn.load_state_dict(whole, like=like.params)
    assert_same_trees(zerofn.unshard(found), whole)
    only = {name: x for name, x in whole.items() if name != "h.0.up"}
    part = zerofn.unshard(zerofn.load_state_dict(only, like=found, strict=False))
    assert_same_trees(part, whole)


def test_weights_of_others(ranks, saved):
    ranks(4, plain_weights, saved, {"data": 2, "tensor": 2})


def half(folder, name, sizes, stage, first):
    """Train the first steps, or the others from what was saved; return the parameters."""
    with in_float64():
        mesh, model = Mesh.make(**sizes), zerofn.skeleton(partial(build, name))
        cuts = tensor(model, mesh) if mesh.size("tensor") > 1 else None

        def init_state():
            return zerofn.TrainState.create(params=dict(build(name).named_parameters()), tx=optim.sgd(0.1, 0.9))

        def loss_fn(params, batch):
            return functional_call(model, params, (), batch).loss

        train_step = step_with(loss_fn)

        state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts)
        state = state if first else zerofn.load(folder / "a", like=state, donate=True)
        step = zerofn.compile(train_step)
        losses = []
        for batch in batches()[:2] if first else batches()[2:]:
            state, loss = step(state, {k: x.chunk(mesh.rows.size)[mesh.rows.rank] for k, x in batch.items()})
            losses.append(loss.item())
        zerofn.save(folder / "a", state)
        return losses, zerofn.unshard(state.params), 0


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        pytest.param("llama, 2 key heads", (4, {"tensor": 4}, 0), (2, {"data": 2}, 1), marks=pytest.mark.whole),
        ("llama", (2, {"data": 2}, 3), (3, {"tensor": 3}, 0)),
    ],
)
def test_training_goes_on_on_another_mesh_as_plain_torch(ranks, tmp_path, name, first, then):
    """At stage 0 a save compares whole leaves between slices, and shared slices between replicas."""
    ranks(first[0], half, tmp_path, name, *first[1:], True)
    losses, params = plain_torch(name)
    assert_same_training(ranks(then[0], half, tmp_path, name, *then[1:], False), (losses[2:], params))


def unequal(folder):
    state = on({"tensor": 2, "data": 2}, 0, 7)
    name = next(name for name, (_, leaf) in state.params.layout.where.items() if name == "h.0.up")
    unit, leaf = state.params.layout.where[name]
    if dist.get_rank() == 3:
        state.params.shards[unit][leaf.offset] += 1
    with pytest.raises(
        ValueError, match=r"rank 2 and rank 3 hold the same slice of 'params.h.0.up', but its values differ"
    ):
        zerofn.save(folder / "a", state)
    assert not (folder / "a").exists()


def test_slices_that_differ_between_replicas_are_named(ranks, tmp_path):
    ranks(4, unequal, tmp_path)


def edited(folder, change):
    from tests.checkpoint.test_bad_checkpoints import edit_manifest

    edit_manifest(folder, change)


@pytest.mark.parametrize("what", ["lost", "twice"])
def test_slices_that_do_not_make_up_the_whole_are_refused(saved, tmp_path, what):
    import shutil

    shutil.copytree(saved / "t2", tmp_path / "t2")

    def change(data):
        tree = data["trees"][0]
        leaf = next(x for x in tree["leaves"] if x.get("region"))
        if what == "lost":
            tree["leaves"].remove(leaf)
        else:
            other = next(t for t in data["trees"][1:] if t["path"] == tree["path"])
            leaf["region"] = next(x for x in other["leaves"] if x["name"] == leaf["name"])["region"]

    edited(tmp_path / "t2", change)
    with pytest.raises(zerofn.CheckpointError, match="do not cover each of its elements once"):
        Checkpoint(tmp_path / "t2")


def refused(folder):
    like = zerofn.shard(
        {"params": {"w": torch.zeros(4, 6)}}, mesh=Mesh.make(tensor=2), cuts={"w": equal("tensor", 0, 4, 2)}
    )
    zerofn.save(folder / "other", zerofn.shard({"params": {"w": torch.zeros(2, 6)}}, mesh=Mesh.make(data=2)))
    with pytest.raises(zerofn.CheckpointError, match=r"'params.w' has shape \(2, 6\) in the file and \(4, 6\)"):
        zerofn.load(folder / "other", like=like)


def test_shapes_are_those_of_whole_leaves(ranks, tmp_path):
    ranks(2, refused, tmp_path)


def kept(sizes, stage, **options):
    from zerofn.launch.payload import packed

    state = on(sizes, stage, 7, **options)
    here = zerofn.abstract(state)
    assert here.params.layout == state.params.layout
    return packed(here, "")


def taken(folder, stage, parcel):
    from tests.sharding.test_abstract import specs
    from zerofn.launch.payload import unpacked

    like = unpacked(parcel)
    assert specs(like) == specs(on({"data": -1}, stage))
    assert_same_trees(zerofn.unshard(zerofn.load(folder / "t3", like=like)), plain(7))


@pytest.mark.parametrize(("sizes", "stage", "there"), [({"tensor": 3}, 1, 2), ({"data": 1, "tensor": 3}, 3, 1)])
def test_an_abstract_state_has_whole_leaves_elsewhere(ranks, saved, sizes, stage, there):
    for parcel in ranks(3, partial(kept), sizes, stage):
        ranks(there, taken, saved, stage, parcel)


def test_an_abstract_state_with_hpz_is_one_without_elsewhere(ranks, saved):
    parcel, *_ = ranks(4, partial(kept, hpz=True), {"replicate": 2, "data": 2}, 3)
    ranks(2, taken, saved, 3, parcel)
