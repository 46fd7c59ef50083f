"""The first steps of DiLoCo, which all replicas take together."""

import pytest
import torch
import torch.nn.functional as F

import zerofn
from tests.support.diloco_runs import build, loss_of, run, seen, started, unit_of
from tests.support.same import assert_same_trees
from zerofn import optim
from zerofn.comm.mesh import Mesh

AFTER = 3


def drawing_step():
    """A step that draws, and the state of a run of it."""
    model = build()

    def train_step(state, batch):
        loss, grads = state.value_and_grad(
            lambda params, x: loss_of(model, params, {"x": F.dropout(x["x"], 0.3), "y": x["y"]})
        )(batch)
        return state.apply_gradients(grads), loss

    params = dict(build().named_parameters())
    return train_step, lambda: zerofn.TrainState.create(params=params, tx=optim.adamw(0.05), seed=5)


def beside_plain_steps(sizes, stages):
    """Steps by `diloco` beside plain ones, and one more step; the keys of replicas behind that."""
    mesh, keys = Mesh.make(**sizes), []
    for stage in stages:
        train_step, init = drawing_step()
        options = {"stage": stage, "mesh": mesh, "unit": unit_of}
        plain, wanted = run(mesh, zerofn.compile(train_step), zerofn.shard(init, **options), last=AFTER)
        step = zerofn.diloco(train_step, every=4, after=AFTER, fragments=2)
        compiled = zerofn.compile(step)
        state, losses = run(mesh, compiled, step.init(zerofn.shard(init, **options)), last=AFTER)
        whole = zerofn.unshard(plain)
        assert_same_trees(losses, wanted, f"stage {stage}")
        assert_same_trees(zerofn.unshard(state.params), whole.params, f"stage {stage}")
        both = zerofn.tree_map(lambda x: torch.stack([x] * 2), whole)
        assert_same_trees(zerofn.unshard(state.replicas), both, f"stage {stage}")
        assert int(state.began) == -1
        state, _ = run(mesh, compiled, state, AFTER, AFTER + 1)
        assert int(state.began) == AFTER
        keys.append(zerofn.unshard(state.replicas).rng.tolist())
    return keys


@pytest.mark.part(stages=[[3]])
@pytest.mark.parametrize(
    ("sizes", "stages"), [({"replicate": 2, "data": 2}, [0, 1, 2, 3]), ({"replicate": 2}, [3])], ids=str
)
def test_the_first_steps_are_those_of_a_run_without_diloco_bit_for_bit(ranks, sizes, stages):
    num_ranks = torch.tensor(list(sizes.values())).prod().item()
    for keys in ranks(num_ranks, beside_plain_steps, sizes, stages):
        assert all(one != other for one, other in keys)


def saved(path):
    mesh = Mesh.make(replicate=2)
    step, state = started(mesh, after=2)
    state, _ = run(mesh, compiled := zerofn.compile(step), state, last=1)
    zerofn.save(path / "early", state)
    state, _ = run(mesh, compiled, state, 1, 4)
    zerofn.save(path / "late", state)
    return seen(state)


def loaded(replicas, path, name, after):
    """The state as it was loaded, and one step on."""
    mesh = Mesh.make(replicate=replicas)
    step, like = started(mesh, after=after)
    state = zerofn.load(path / name, like=like, donate=True)
    before = seen(state)
    state, _ = run(mesh, zerofn.compile(step), state, 4, 5)
    return before, seen(state), int(state.began)


def test_replicas_that_train_apart_stay_so_whatever_after_is_by_then(ranks, tmp_path):
    state = ranks(2, saved, tmp_path)[0]
    for before, later, began in ranks(2, loaded, 2, tmp_path, "late", 100):
        assert_same_trees(before, state)
        assert began == 2
        own = later[1]
        assert not torch.equal(own[0]["0.weight"], own[1]["0.weight"])


@pytest.mark.part(replicas=[1])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_run_that_has_not_begun_to_train_apart_goes_on_with_other_replicas(ranks, tmp_path, replicas):
    ranks(2, saved, tmp_path)
    found = ranks(replicas, loaded, replicas, tmp_path, "early", 2)
    for before, (anchor, own), began in found:
        assert_same_trees(before[1], [before[0]] * replicas)
        assert began == -1
        assert_same_trees(own, [anchor] * replicas)
    sooner = ranks(replicas, loaded, replicas, tmp_path, "early", 1)
    assert [began for _, _, began in sooner] == [1] * replicas
