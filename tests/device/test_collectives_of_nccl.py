"""The branch of backends other than gloo, run on gloo, with what NCCL requires asserted at every call.

NCCL's collectives take contiguous tensors of certain dtypes, of sizes that fit together, on every rank alike.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, loss_of, state_of, train_step_of, unit_of
from zerofn import collectives, optim, tree
from zerofn.comm import transport
from zerofn.runtime import repeatable

KNOWN = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
MODULE = build(3)


def _holds(x):
    assert x.is_contiguous(), f"not contiguous: {x.shape} {x.stride()}"
    assert x.dtype in KNOWN, f"NCCL has no {x.dtype}"


@contextlib.contextmanager
def as_on_devices(counted):
    """Force the branch, and assert NCCL's contract."""
    size = dist.get_world_size()

    def checked(module, name, ratio):
        original = getattr(module, name)

        def call(out, given, *args, **kwargs):
            _holds(out), _holds(given)
            assert out.dtype == given.dtype and out.numel() * ratio[1] == given.numel() * ratio[0], (name, out, given)
            counted.append(name)
            return original(out, given, *args, **kwargs)

        return call

    original = dist.batch_isend_irecv

    def batch(ops):
        for op in ops:
            _holds(op.tensor)
            assert op.group_peer != op.group.rank()
        counted.append("permute")
        return original(ops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "is_gloo", lambda group, x: False)
        for module, name, ratio in (
            (transport, "all_gather_single", (size, 1)),
            (transport, "reduce_scatter_single", (1, size)),
            (dist, "all_to_all_single", (1, 1)),
        ):
            patch.setattr(module, name, checked(module, name, ratio))
        patch.setattr(dist, "batch_isend_irecv", batch)
        yield


def every_collective():
    """All collectives, in many dtypes and memory orders, beside gloo's branch."""
    rank, size, counted = dist.get_rank(), dist.get_world_size(), []
    draw = torch.Generator().manual_seed(rank)
    base = torch.randint(-99, 99, (size, 6), generator=draw)
    calls = {
        "all_gather": lambda x: collectives.all_gather(x, dim=1),
        "all_reduce": collectives.all_reduce,
        "reduce_scatter": lambda x: collectives.reduce_scatter(x, dim=0),
        "all_to_all": collectives.all_to_all,
        "permute": lambda x: collectives.permute(x, [(r + 1) % size for r in range(size)]),
        "fixed point": lambda x: collectives.permute(x, [*range(size - 1, 0, -1), 0] if size > 2 else [1, 0]),
    }
    for name, call in calls.items():
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.float64):
            if name in ("all_reduce", "reduce_scatter") and dtype in (torch.int16, torch.bool):
                continue  # sums of those are not used
            x = base.to(dtype)
            for given in (x, x.t().contiguous().t(), x[:, :1].expand(-1, 6)):
                expected = call(given)
                with as_on_devices(counted):
                    got = call(given)
                torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2, msg=f"{name} of {dtype}")
    return sorted(set(counted))


@pytest.mark.part(size=[3])
@pytest.mark.parametrize("size", [2, 3])
def test_every_collective(ranks, size):
    every = ["all_gather_single", "all_to_all_single", "permute", "reduce_scatter_single"]
    assert all(set(found) <= set(every) and "permute" in found for found in ranks(size, every_collective))


def trained(stage, precision, frozen, num_steps=3, deterministic=False):
    options = {"frozen": lambda name: name.startswith("0.")} if frozen else {}
    state = state_of(MODULE, stage, optim.adamw(1e-2), precision=precision, **options)
    step, found = zerofn.compile(train_step_of(MODULE, 2), deterministic=deterministic), []
    loss_fn = loss_of(MODULE)

    def evaluate(state, batch):
        params = zerofn.gather(state.params)
        return {"loss": loss_fn(params, tree.tree_map(lambda x: x.to(params["0.weight"].dtype), batch))}

    evaluate = zerofn.compile(evaluate)
    for k in range(num_steps):
        batch = tree.tree_map(lambda x: x.to(torch.bfloat16), batch_of(dist.get_rank(), seed=k))
        batch = batch if precision in ("bf16", "fp16") else batch_of(dist.get_rank(), seed=k)
        state, _ = step(state, batch)
        found.append(evaluate(state, batch)["loss"])
    return zerofn.unshard(state.params), found


def both(stage, precision, frozen):
    counted = []
    expected = trained(stage, precision, frozen)
    with as_on_devices(counted):
        got = trained(stage, precision, frozen)
    assert counted
    return got, expected


@pytest.mark.part(stage=[0], precision=["bf16"])
@pytest.mark.parametrize(
    ("size", "precision", "frozen"), [(2, None, False), (2, "bf16", True), (3, "fp16", False), (3, None, True)]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training(ranks, size, stage, precision, frozen):
    for got, expected in ranks(size, both, stage, precision, frozen):
        if size == 2:
            assert_same_trees(got, expected)  # a sum of two has one order
        else:
            torch.testing.assert_close(tree.leaves(got), tree.leaves(expected), rtol=2e-2, atol=2e-2)


@pytest.mark.whole
@pytest.mark.part(stage=[1])
@pytest.mark.parametrize("stage", [1, 3])
def test_coded_sums_are_in_rank_order(ranks, stage):
    """On three ranks, whose sums have several orders."""
    for got, expected in ranks(3, both, stage, zerofn.Precision(wire="bf16"), False):
        assert_same_trees(got, expected)


def both_in_rank_order(stage):
    expected, counted = trained(stage, None, False), []
    with as_on_devices(counted), pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeatable, "_is_host", lambda device: False)
        got = trained(stage, None, False, deterministic=True)
    return got, expected, counted


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [0, 3])
def test_deterministic_sums_are_in_rank_order(ranks, stage):
    """On three ranks, whose sums have several orders, with the bits of gloo's branch."""
    for got, expected, counted in ranks(3, both_in_rank_order, stage):
        assert_same_trees(got, expected)
        assert "all_to_all_single" in counted and "reduce_scatter_single" not in counted


def gradient_of_a_sum():
    """A cotangent that is one element, repeated."""
    x = torch.arange(6.0).requires_grad_()
    with as_on_devices([]):
        (grad,) = torch.autograd.grad(collectives.reduce_scatter(x.repeat(dist.get_world_size())).sum(), x)
    return grad


def test_a_gradient_without_strides(ranks):
    for grad in ranks(2, gradient_of_a_sum):
        assert torch.equal(grad, torch.full((6,), 2.0))


def cut(stage):
    state = {"params": {"0.weight": torch.ones(7, 3), "1.weight": torch.ones(5)}}
    with as_on_devices([]):
        return zerofn.unshard(zerofn.shard(state, stage=stage, unit=unit_of, precision="bf16"))


@pytest.mark.parametrize("stage", [0, 3])
def test_halves_of_masters_are_moved(ranks, stage):
    for found in ranks(2, cut, stage):
        assert torch.equal(found["params"]["0.weight"], torch.ones(7, 3))
