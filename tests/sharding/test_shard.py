"""`shard` and `unshard` on real ranks: what goes in comes out, cut as the rules say, and nothing else is held."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn

import zerofn
from zerofn import Sharded, optim, shard, tree, unshard
from zerofn.sharding.state_tree import as_tensor

Moments = namedtuple("Moments", "count mu nu")
STAGES = (0, 1, 2, 3)


@dataclass
class State:
    params: Any
    moments: Any
    lr: float = 0.1


def draw(seed=3):
    """Parameters of odd sizes, an empty one and a scalar among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "emb.weight": (173, 29),
        "h.0.w": (31, 33),
        "h.0.b": (33,),
        "h.1.w": (400, 301),
        "h.1.empty": (0, 4),
        "scale": (),
        "head.w": (67, 1),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def moments():
    return Moments(3, draw(4), draw(5))


def states():
    params, nested = draw(), {"gen": draw(6), "disc": {"0.w": torch.randn(9, 9), "1.w": torch.randn(70000)}}
    return {
        "dict": {"params": params, "opt": moments(), "n": None, "i": 7, "f": 0.5, "b": True},
        "inside a list": [{"params": params, "opt": moments()}, torch.arange(5)],
        "inside a tuple": ({"params": params}, {"position": 12}),
        "namedtuple": namedtuple("Named", "params opt")(list(params.values()), list(draw(4).values())),
        "dataclass": State(params, moments()),
        "params a TensorDict": {"params": TensorDict(params), "mu": TensorDict(draw(4))},
        "all a TensorDict": TensorDict({"params": TensorDict(params), "mu": TensorDict(draw(4)), "t": torch.ones(3)}),
        "nested": {
            "params": nested,
            "opt": {"gen": tree.tree_map(torch.ones_like, nested["gen"])},
            "extra": {"ema": tree.tree_map(torch.clone, nested)},
        },
        "list of layers": {"params": [{"w": torch.randn(5, 5)}, {"w": torch.randn(70001)}], "mu": [None]},
        "several dtypes": {"params": params | {"half": torch.randn(5).bfloat16(), "ids": torch.arange(9)}},
    }


def same(a, b):
    """Equal leaves, bit for bit, of one dtype, at equal paths."""
    paths, mine, _ = tree.flatten_with_path(a)
    others, theirs, _ = tree.flatten_with_path(b)
    assert [tree.name_of(p) for p in paths] == [tree.name_of(p) for p in others]
    for path, x, y in zip(paths, mine, theirs, strict=True):
        x, y = (v if isinstance(v, torch.Tensor) else as_tensor(v) for v in (x, y))
        assert torch.equal(x, y) and x.dtype == y.dtype, tree.name_of(path)


def sharded_nodes(state):
    return [x for x in tree.leaves(state, is_leaf=lambda x: isinstance(x, Sharded)) if isinstance(x, Sharded)]


def memory_of(state):
    return {x.data_ptr() for x in tree.leaves(state) if isinstance(x, torch.Tensor) and x.numel()}


def round_trips(stage):
    torch.manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = {}
    for name, state in states().items():
        kept = tree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
        placed = shard(state, stage=stage)
        assert not memory_of(state) & memory_of(placed), f"{name}: the result aliases its input"
        counts[name] = len(sharded_nodes(placed))
        for node in sharded_nodes(placed):
            for unit, cut in zip(node.layout.units, node.shards, strict=True):
                assert cut.numel() == unit.size // (size if stage else 1)
        back = unshard(placed)
        same(back, kept)
        assert type(back) is (dict if isinstance(kept, TensorDict) else type(kept))
        alone = unshard(placed, rank=size - 1)
        if rank == size - 1:
            same(alone, kept)
        elif name == "dict":
            assert alone["params"] is None and alone["opt"] == (torch.tensor(3), None, None)
    return counts


@pytest.mark.part(size=[3], stage=[3])
@pytest.mark.part(size=[2], stage=[0, 1])
@pytest.mark.part(size=[1], stage=[2])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_every_container_comes_back_bit_for_bit(ranks, size, stage):
    found = ranks(size, round_trips, stage)
    assert found[0] == {
        "dict": 3,
        "inside a list": 3,
        "inside a tuple": 1,
        "namedtuple": 2,
        "dataclass": 3,
        "params a TensorDict": 2,
        "all a TensorDict": 2,
        "nested": 3,
        "list of layers": 1,
        "several dtypes": 1,
    }
    assert all(f == found[0] for f in found)


def dtypes_of_moments(precision):
    params = {k: v.to(torch.bfloat16) for k, v in draw().items()}
    state = {
        "params": params,
        "like": tree.tree_map(torch.ones_like, params),
        "fp32": draw(4),
        "fp64": {k: v.double() for k, v in draw(5).items()},
        "mask": {k: v > 0 for k, v in draw().items()},
        "count": {k: torch.full(v.shape, 3) for k, v in draw().items()},
    }
    placed = shard(state, stage=3, precision=precision)
    back = unshard(placed)
    for name in ("fp32", "fp64", "mask", "count"):
        same(back[name], state[name])
    return {name: {str(p.dtype) for p in x.shards} for name, x in placed.items()}


@pytest.mark.parametrize("precision, params", [(None, "bfloat16"), ("bf16", "float32"), ("fp16", "float32")])
def test_other_trees_keep_their_dtypes(ranks, precision, params):
    """Parameters become the master's dtype, and what was made like them with them; nothing else is cast."""
    for found in ranks(2, dtypes_of_moments, precision):
        assert found == {
            "params": {f"torch.{params}"},
            "like": {f"torch.{params}"},
            "fp32": {"torch.float32"},
            "fp64": {"torch.float64"},
            "mask": {"torch.bool"},
            "count": {"torch.int64"},
        }


def shared_storage():
    base = torch.randn(64, 48)
    state = {
        "params": {"tied": base, "again": base, "view": base[3:9], "turned": base.t(), "wide": base[:1].expand(5, 48)},
        "n": base[0],
    }
    placed = shard(state, stage=3)
    same(unshard(placed), state)
    replicated = shard(state, stage=0)
    base.fill_(0)
    assert replicated["params"]["tied"].local.abs().sum() > 0
    local = replicated["params"]["tied"].local
    before = replicated["params"]["again"].local.clone()
    local.zero_()
    assert torch.equal(replicated["params"]["again"].local, before)
    parameter = nn.Parameter(torch.randn(3))
    (out,) = tree.leaves(shard({"params": {"p": parameter}}, stage=1))
    assert type(out) is torch.Tensor and not out.requires_grad


def test_leaves_that_share_storage_are_copied_once_each(ranks):
    ranks(2, shared_storage)


# --- shard(function)


class Net(nn.Module):
    def __init__(self, width=48, depth=3, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(101, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 101, bias=False)
        self.head.weight = self.embed.weight
        if width == 48:  # a sampler with memory of its own
            nn.init.trunc_normal_(self.layers[0].weight)
        self.to(dtype)


def make_dict():
    params = {k: v.detach() for k, v in Net().named_parameters()}
    return {"params": params, "mu": tree.tree_map(torch.zeros_like, params), "step": 0}


def make_train_state():
    net = Net(dtype=torch.bfloat16)
    params = dict(net.named_parameters())
    ema = {k: v.detach().clone() for k, v in params.items()}
    extra = {"buffers": dict(net.named_buffers()), "ema": ema, "position": 0}
    return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3), extra=extra)


def make_draws_for_moments():
    """Moments that are drawn, after the parameters."""
    params = dict(Net().named_parameters())
    return {"params": params, "noise": {k: torch.randn_like(v) for k, v in params.items()}}


INITS = [make_dict, make_train_state, make_draws_for_moments]


def function_equals_value(stage):
    for init in INITS:
        torch.manual_seed(9)
        value = shard(init(), stage=stage)
        after = torch.get_rng_state()
        torch.manual_seed(9)
        found = shard(init, stage=stage)
        assert torch.equal(after, torch.get_rng_state())
        assert tree.structure(value) == tree.structure(found)
        for x, y in zip(sharded_nodes(value), sharded_nodes(found), strict=True):
            for unit, a, b in zip(x.layout.units, x.shards, y.shards, strict=True):
                assert a.dtype == b.dtype, unit.name
        same(unshard(found), unshard(value))
        torch.manual_seed(9)
        same(tree.leaves(unshard(found)), tree.leaves(init()))


@pytest.mark.part(stage=[0, 3])
@pytest.mark.parametrize("size, stage", [(1, 3), (2, 0), (2, 1), (2, 3), (3, 2)])
def test_shard_of_a_function_is_shard_of_its_value(ranks, size, stage):
    ranks(size, function_equals_value, stage)


def differently_seeded(stage, by_function):
    torch.manual_seed(dist.get_rank())

    def init():
        state = make_train_state()
        drawn = {"noise": torch.randn(5), "flag": torch.rand(()) > 0.5, "half": torch.randn(3).bfloat16()}
        return state.replace(extra=state.extra | drawn | {"empty": torch.zeros(0)})

    state = shard(init if by_function else init(), stage=stage)
    full = unshard(state)
    again = tree.unflatten(*reversed(tree.flatten(state.params)))  # without the gathered copy
    same(zerofn.gather(again), zerofn.gather(state.params))
    same(full.params, full.extra["ema"])
    replicated = {k: full.extra[k] for k in ("noise", "flag", "half", "empty", "position")}
    return full.params | {f"ema.{k}": v for k, v in full.extra["ema"].items()} | replicated


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_with_other_seeds_end_up_with_equal_replicas(ranks, stage, by_function):
    first, *others = ranks(3, differently_seeded, stage, by_function)
    for other in others:
        same(first, other)


def peak_of(stage):
    """Bytes of tensors alive at the worst moment of `shard(function)`, and what the state takes; the same of what
    `unshard` makes of the parameters."""
    from tests.deferred_init.test_record import PeakBytes

    class Real(PeakBytes):
        def _meet(self, storage):
            if storage.device.type != "meta":  # recording makes tensors without memory
                super()._meet(storage)

    with Real() as peak:
        state = shard(make_deep, stage=stage)
    held = sum(x.nbytes for x in tree.leaves(state))
    with Real() as whole_peak:
        whole = unshard(state.params)
    shards = sum(x.nbytes for x in state.params.shards)  # were there before, and are met as views
    return peak.peak, held, whole_peak.peak - shards, sum(x.nbytes for x in tree.leaves(whole))


WIDTH, DEPTH = 256, 12


def make_deep():
    params = dict(Net(WIDTH, DEPTH).named_parameters())
    return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3))


def test_a_function_is_never_held_whole(ranks):
    unit = 4 * (WIDTH * WIDTH + WIDTH)
    whole = 4 * sum(p.numel() for p in Net(WIDTH, DEPTH).parameters())
    for peak, state, whole_peak, found in ranks(4, peak_of, 3):
        assert state <= 3 * whole / 4 * 1.13  # small units: padding
        assert peak <= state + 2 * unit, (peak, state, unit)
        assert found == whole < whole_peak <= whole + unit * 1.25, (whole_peak, whole, unit)  # padding again


# --- errors


def refusals():
    good = {"params": draw()}
    net = nn.Linear(2, 2)
    bad = {
        r"\(a dict\) has no entry 'params'": (ValueError, lambda: shard({"weights": draw()})),
        r"\(a Linear\) has no entry 'params'": (ValueError, lambda: shard(net)),
        r"Tensor\) has no entry 'params'": (ValueError, lambda: shard(lambda: torch.zeros(3))),
        "'params' must be a container.*Tensor": (ValueError, lambda: shard({"params": torch.zeros(3)})),
        "'params' must be a container.*dict": (ValueError, lambda: shard({"params": {}})),
        "leaf 'params.name' is a str": (TypeError, lambda: shard({"params": draw() | {"name": "gpt"}})),
        "leaf 'opt.fn' is a function": (TypeError, lambda: shard(good | {"opt": {"fn": draw}})),
        "leaf 'extra.1' is a object": (TypeError, lambda: shard(lambda: good | {"extra": [1, object()]})),
        "leaf 'params' is a Linear": (TypeError, lambda: shard({"params": net})),
        "stage=4 is not known.*mean 3": (ValueError, lambda: shard(good, stage=4)),
        "stage='2' is not known.*mean 2": (ValueError, lambda: shard(good, stage="2")),
        "stage=True is not known": (ValueError, lambda: shard(good, stage=True)),
        "precision='bf8' is not known; did you mean 'fp8'": (ValueError, lambda: shard(good, precision="bf8")),
        "mesh: expected None, a DeviceMesh": (TypeError, lambda: shard(good, mesh=4)),
        "device": (ValueError, lambda: shard(good, device="gpu")),
        "already sharded": (TypeError, lambda: shard(shard(good))),
        "of the user": (KeyError, lambda: shard(raises)),
    }
    for words, (kind, call) in bad.items():
        with pytest.raises(kind, match=words):
            call()
    same(unshard(shard(good)), good)  # and it goes on


def unshards_where_nobody_is():
    state = shard({"params": draw()})
    for rank in (-1, dist.get_world_size()):
        with pytest.raises(ValueError, match=rf"unshard: rank={rank!r} does not exist; the state is on"):
            unshard(state, rank=rank)
    assert (unshard(state, rank=0)["params"] is not None) == (dist.get_rank() == 0)


def unshards_a_unit():
    params = {"a": torch.randn(300, 300), "b": {"c": torch.randn(300, 300)}}
    found = unshard(shard({"params": dict(params)}), only="b.c".__eq__)["params"]
    assert found["a"] is None and torch.equal(found["b"]["c"], params["b"]["c"])


def test_a_unit_by_itself(ranks):
    ranks(1, unshards_a_unit)
    ranks(2, unshards_a_unit)


def test_a_rank_that_is_not_there_is_refused_on_all(ranks):
    ranks(1, unshards_where_nobody_is)
    ranks(2, unshards_where_nobody_is)


def raises():
    raise KeyError("of the user")


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_sharded_raises_a_sentence(ranks, size):
    ranks(size, refusals)


def other_shapes():
    rank = dist.get_rank()
    params = draw() | ({"h.0.w": torch.zeros(31, 34)} if rank == 1 else {})
    with pytest.raises(RuntimeError, match="ranks differ") as caught:
        shard({"params": params})
    with pytest.raises((RuntimeError, TypeError)) as failed:
        shard({"params": draw() | ({"bad": "text"} if rank == 2 else {})})
    with pytest.raises(RuntimeError, match="ranks differ"):
        shard({"params": draw()}, stage=3 - rank)
    shard({"params": draw()})
    return str(caught.value), str(failed.value)


def test_ranks_that_differ_raise_everywhere_and_go_on(ranks):
    for rank, (shapes, failed) in enumerate(ranks(3, other_shapes)):
        assert "h.0.w [31, 33]" in shapes and "h.0.w [31, 34]" in shapes, rank
        assert "leaf 'params.bad' is a str" in failed
        assert ("rank 2 failed" in failed) == (rank != 2)


def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match="shard: device='cuda:77' is not available: "):
        zerofn.shard({"params": {"w": torch.ones(3)}}, device="cuda:77")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("function", [False, True])
def test_other_memory_formats_become_row_major(stage, function):
    weight = torch.arange(48.0).view(4, 3, 2, 2).to(memory_format=torch.channels_last)
    make = lambda: {"params": {"w": weight.clone(), "v": torch.ones(3, 5).T}}  # noqa: E731
    params = zerofn.gather(zerofn.shard(make if function else make(), stage)["params"])
    assert torch.equal(params["w"], weight) and not weight.is_contiguous()
    assert all(x.is_contiguous() for x in params.values())
