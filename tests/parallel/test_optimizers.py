"""Rules that look at whole leaves, and noise, on slices of leaves as on whole ones."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.some import some_of
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import equal
from zerofn.parallel import tensor

STEPS = 3
PLAN = {"up": "colwise", "down": "rowwise"}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(40, 61), nn.Linear(61, 40), nn.LayerNorm(40)

    def forward(self, x):
        return self.norm(self.down(torch.tanh(self.up(x))))


def mlp():
    torch.manual_seed(0)
    return Mlp().double()


def label(leaf):
    """Of the whole leaf's shape, which no slice has."""
    return "long" if leaf.numel() > 61 * 30 else "short"


RULES = {
    "adafactor": lambda: optim.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9, weight_decay_rate=0.01),
    "adafactor, not factored": lambda: optim.adafactor(1e-2, min_dim_size_to_factor=1000),
    "lamb": lambda: optim.lamb(1e-2, weight_decay=0.1),
    "muon": lambda: optim.muon(1e-2, weight_decay=0.1),
    "muon, by shape": lambda: optim.muon(1e-2, consistent_rms=0.2, adaptive=True),
    "clip of rows": lambda: optim.chain(optim.adaptive_grad_clip(1e-3), optim.sgd(0.1)),
    "clip of columns": lambda: optim.masked(
        optim.chain(optim.adaptive_grad_clip(1e-3, axis=0), optim.sgd(0.1)), lambda leaf: leaf.ndim == 2
    ),
    "by size": lambda: optim.multi_transform({"long": optim.sgd(0.1), "short": optim.adam(0.01)}, label),
}


def batches():
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(12, 40, generator=draw, dtype=torch.float64) for _ in range(STEPS)]


def plain(name):
    """The parameters after all steps, of whole leaves in one process, with gradients of plain torch."""
    model, tx = mlp(), RULES[name]()
    params = {k: v.detach() for k, v in model.named_parameters()}
    state = tx.init(params)
    for x in batches():
        grads = torch.func.grad(lambda p, x=x: functional_call(model, p, (x,)).pow(3).mean())(params)
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return params


def trained(names, sizes, stage, captured):
    mesh, found = Mesh.make(**sizes), {}
    for name in names:
        model = zerofn.skeleton(mlp)
        cuts = tensor(model, mesh, PLAN)

        def init_state(name=name):
            return zerofn.TrainState.create(params=dict(mlp().named_parameters()), tx=RULES[name]())

        def train_step(state, x, model=model):
            loss, grads = state.value_and_grad(lambda p, x: functional_call(model, p, (x,)).pow(3).mean())(x)
            return state.apply_gradients(grads), loss

        unit = (lambda name: name.split(".")[0]) if stage == 3 else None  # so that some shards have no leaf
        state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts, unit=unit)
        step = zerofn.compile(train_step) if captured else train_step
        for x in batches():
            state, _ = step(state, x.chunk(mesh.batch.size)[mesh.batch.rank])
        found[name] = zerofn.unshard(state.params)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "stage", "captured"),
    [
        (2, {"tensor": 2}, 3, True),
        pytest.param(3, {"tensor": 3}, 0, True, marks=pytest.mark.whole),
        pytest.param(4, {"data": 2, "tensor": 2}, 1, True, marks=pytest.mark.whole),
        pytest.param(4, {"tensor": 2, "data": 2}, 3, True, marks=pytest.mark.whole),
        pytest.param(4, {"data": 2, "tensor": 2}, 2, False, marks=pytest.mark.whole),
        pytest.param(4, {"tensor": 4}, 3, True, marks=pytest.mark.whole),
    ],
)
def test_rules_are_those_of_whole_leaves(ranks, num_ranks, sizes, stage, captured):
    names = list(RULES) if (num_ranks, stage) == (4, 1) else [x for x in RULES if "," not in x]
    names = some_of(names, "adafactor", "muon", "clip of columns", "by size")
    expected = {name: plain(name) for name in names}
    for found in ranks(num_ranks, trained, names, sizes, stage, captured):
        for name, params in expected.items():
            largest = max(x.abs().max() for x in params.values())
            for key, x in params.items():
                assert (found[name][key] - x).abs().max() <= 1e-12 * largest, (name, key)


SHAPES = {"rows": (301, 130), "columns": (130, 301), "heads": (12, 7), "third": (3, 4, 50), "bias": (301,), "s": ()}


def noise(sizes):
    mesh = Mesh.make(**sizes)
    num = mesh.size("tensor")
    cuts = {
        "rows": equal("tensor", 0, 301, num),
        "columns": equal("tensor", 1, 301, num),
        "heads": equal("tensor", 0, 12, num, unit=6 if num % 2 == 0 else 3),
        "third": equal("tensor", 2, 50, num, parts=2),
    }
    key, found = zerofn.random.key(4), []
    for dtype in (torch.float32, torch.bfloat16):
        values = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
        whole = zerofn.normal_like(values, key)
        for stage in range(4):
            params = zerofn.shard({"params": values}, stage=stage, mesh=mesh, cuts=cuts)["params"]
            ours = zerofn.unshard(zerofn.normal_like(params, key))
            found += [torch.equal(ours[name], whole[name]) for name in SHAPES]
    captured = zerofn.compile(lambda state, _: (zerofn.normal_like(state, key), torch.zeros(())))
    state, _ = captured({"params": params}, torch.zeros(()))
    ours = zerofn.unshard(state["params"])
    return found + [torch.equal(ours[name], whole[name]) for name in SHAPES]


@pytest.mark.part(num_ranks=[2])
@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(2, {"tensor": 2}), (3, {"tensor": 3}), (4, {"data": 2, "tensor": 2})]
)
def test_noise_has_the_bits_of_whole_leaves(ranks, num_ranks, sizes):
    for found in ranks(num_ranks, partial(noise, sizes)):
        assert len(found) == 54 and all(found)
