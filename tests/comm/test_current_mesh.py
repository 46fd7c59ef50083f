"""Which mesh is meant where none is given, and what ranks know of themselves on it: beside plain torch."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.small_steps import fake_ranks
from zerofn import collectives, optim
from zerofn.comm.current_mesh import as_rank, axes_of, rank, unlike_work, works_by_rank, world_size
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import equal

ROWS, TOKENS, WIDTH = 8, 4, 8
X = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def loss_of(model, params, x):
    return functional_call(model, {k: v for k, v in params.items() if k != "more"}, (x,)).square().mean()


def on_a_mesh(sizes):
    """The page's forms, inside of compiled steps, eagerly, and with nothing given."""
    mesh, model = Mesh.make(**sizes), zerofn.skeleton(build)
    cuts = {}
    params = {**dict(build().named_parameters()), "more": torch.arange(4.0)}
    if "tensor" in sizes:
        cuts = zerofn.parallel.tensor(model, mesh, {"0": "colwise", "2": "rowwise"})
    if "expert" in sizes:
        cuts = {"more": equal("expert", 0, 4, 2)}
    state = zerofn.shard(
        lambda: zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)), mesh=mesh, cuts=cuts or None
    )
    num, mine = world_size("rows"), rank("rows")
    rows = list(zerofn.sampler(range(ROWS), shuffle=False))
    assert rows == list(range(ROWS))[mine::num]
    x = X[rows]
    if "context" in sizes:
        x = x.chunk(2, 1)[mesh.axis("context").rank]

    def evaluate(params, batch):
        with torch.no_grad():
            loss = loss_of(model, zerofn.gather(params), batch)
            return collectives.mean(loss, like=params), collectives.mean(loss)

    def step(state, batch):
        loss_fn = lambda p, b: collectives.mean(loss_of(model, p, b))  # noqa: E731
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    found = [*zerofn.compile(evaluate)(state.params, x), *evaluate(state.params, x)]
    looked = zerofn.gather(state.params, only="0.weight")["0.weight"].clone()
    captured = zerofn.compile(lambda p, b: zerofn.gather(p, only="0.weight")["0.weight"].sum())(state.params, x)
    gathered = collectives.all_gather(x.flatten(0, 1).sum(-1))  # of all rows and tokens, each once
    state, loss = zerofn.compile(step)(state, x)
    return found, looked, captured, gathered.sort().values, loss, zerofn.unshard(state.params)


@pytest.mark.part(sizes=[{"data": 2, "tensor": 2}])
@pytest.mark.parametrize(
    "sizes",
    [{"data": 2, "tensor": 2}, {"data": 2, "context": 2}, {"replicate": 2, "data": 2}, {"expert": 2, "data": 2}],
    ids=str,
)
def test_the_forms_of_the_pages_are_right_on_every_mesh(ranks, sizes):
    plain = build()
    loss = plain(X).square().mean()
    loss.backward()
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in plain.named_parameters()}
    whole = build()[0].weight.detach()
    for found, looked, captured, gathered, its_loss, params in ranks(4, on_a_mesh, sizes):
        for value in (*found, its_loss):
            torch.testing.assert_close(value, loss.detach())
        assert torch.equal(looked, whole)
        torch.testing.assert_close(captured, whole.sum())
        torch.testing.assert_close(gathered, X.sum(-1).flatten().sort().values)
        torch.testing.assert_close({k: params[k] for k in expected}, expected)
        assert torch.equal(params["more"], torch.arange(4.0))


def test_ranks_along_tensor_and_context_share_their_rows():
    with fake_ranks(8, 5):
        Mesh.make(data=2, context=2, tensor=2)
        assert (rank(), rank("rows"), world_size("rows"), rank("tensor")) == (5, 1, 2, 1)
        assert (world_size("context"), rank("context")) == (2, 0)


def test_several_meshes_are_told_where_other_ranks_are_meant():
    with fake_ranks(4):
        one = Mesh.make(data=2, tensor=2)
        assert world_size("rows") == 2
        Mesh.make(data=4)
        asked = {
            "like=mesh": lambda **given: collectives.mean(torch.ones(()), **given),
            "axis=mesh.batch": lambda **given: collectives.all_reduce(torch.ones(()), **given),
            "axis=mesh.axis('data')": lambda **given: collectives.all_reduce(
                torch.ones(()), **({"axis": "data"} | given)
            ),
            "mesh=mesh": lambda **given: list(zerofn.sampler(range(8), shuffle=False, **given)),
        }
        for written, call in asked.items():
            with pytest.raises(ValueError, match=rf"several meshes.*write .*{re.escape(written)}"):
                call()
            call(**eval(f"dict({written})", {"mesh": one}))
        for among, call in itertools.product(["rows", "data"], [rank, world_size]):
            with pytest.raises(ValueError, match="several meshes") as told:
                call(among)
            (written,) = re.findall(r"write (mesh\S+),", str(told.value))
            with axes_of(one):
                assert eval(written, {"mesh": one}) == call(among)
        assert collectives.mean(torch.ones(()), like=one).shape == ()
        with axes_of(one):
            assert world_size("rows") == 2


def test_meshes_in_which_the_same_ranks_are_meant_are_no_matter():
    with fake_ranks(4):
        Mesh.make(data=4)
        Mesh.make(replicate=2, data=2)
        assert world_size("rows") == 4


def test_a_mean_wants_a_mesh():
    with pytest.raises(ValueError, match="nothing in `like` is sharded"):
        collectives.mean(torch.ones(()), like={"w": torch.ones(3)})
    assert collectives.mean(torch.tensor([1, 2])).tolist() == [1.0, 2.0]


def test_an_axis_that_is_not_there():
    with pytest.raises(ValueError, match="no axis 'tensor'"):
        rank("tensor")


def test_work_by_rank_is_noted_and_seen_as_each_rank():
    axis = Mesh.planned({"context": 2}).axis("context")
    works_by_rank(axis)  # nobody plans
    with unlike_work() as found:
        works_by_rank(axis)
        with as_rank(axis, 1):
            assert axis.rank == 1
    assert found == {"context"} and axis.rank == 0
