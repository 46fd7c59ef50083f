"""Writes to memory of a step's own become values: the same bits, and only where nothing else looks at the memory."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import zerofn
from tests.support.op_samples import OPERATIONS, samples
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captured, results, state_of, step_with, train_step_of
from zerofn import optim
from zerofn._torch_compat import TorchDispatchMode
from zerofn.graph.alias import roots, writes
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.functionalize import _out_of_place, functionalize


def written(gm):
    """Operations in place."""
    return [n for n in gm.graph.nodes if writes(n)]


def test_masks_are_drawn_as_values():
    module, batch = build(4, dropout=0.3), batch_of()
    state, step = state_of(module, 3), train_step_of(module)
    plain = captured(step, state, batch, canonicalize)
    pure = captured(step, state, batch, canonicalize, functionalize)
    assert written(plain.gm) and not written(pure.gm)
    assert_same_trees(results(pure, state, batch), results(plain, state, batch))


def program_of(loss):
    """A step's program, before and after, with `loss(x, w)`."""
    params = {"w": torch.linspace(0.1, 1.0, 8)}
    step = step_with(lambda p, x: loss(x, p["w"]))

    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)))
    batch = torch.linspace(-1.0, 1.0, 8)
    before = captured(step, state, batch, canonicalize)
    expected = results(before, state, batch)
    after = captured(step, state, batch, canonicalize, functionalize)
    assert_same_trees(results(after, state, batch), expected)
    return before.gm, after.gm


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, w: (x * 2).add_(1).mul_(3).mul(w).sum(),
        lambda x, w: torch.zeros(8).copy_(x).mul(w).sum(),
        lambda x, w: (x.clone().clamp_(min=0) * w).sum(),
        lambda x, w: (x.exp().masked_fill_(x > 0, 2.0) * w).sum(),
        lambda x, w: ((x * 1).pow_(2) * w).sum(),
    ],
)
def test_writes_into_a_steps_own_tensors_are_made_pure(loss):
    before, after = program_of(loss)
    assert written(before) and not written(after)


def through_a_view(x, w):
    y = x * 2
    y[:4].add_(1)
    return (y * w).sum()


def seen_by_a_view(x, w):
    y = x * 2
    first = y[:4]
    y.add_(1)
    return (y * w).sum() + (first * w[:4]).sum()


def copied_over_twice(x, w):
    y, z = torch.zeros(8), x * 2
    y.copy_(z)
    z.add_(1)
    return (y * w).sum() + (z * w).sum()


def copied_from_what_changes(x, w):
    y, z = torch.zeros(8), x * 2
    y.copy_(z.view(2, 4).view(8))
    z.view(2, 4)[0].add_(1)
    return (y * w).sum() + (z * w).sum()


@pytest.mark.parametrize("loss", [through_a_view, seen_by_a_view, copied_over_twice, copied_from_what_changes])
def test_what_is_looked_at_otherwise_stays(loss):
    _, after = program_of(loss)
    assert written(after)


def test_no_write_into_state_is_touched():
    module = torch.nn.BatchNorm1d(4)

    def step(state, batch):
        def loss_fn(params, x):
            buffers = {k: v.clone() for k, v in state.extra.items()}
            return functional_call(module, {**params, **buffers}, (x,)).square().mean(), buffers

        (loss, buffers), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)
        return state.apply_gradients(grads, extra=buffers), loss

    state = zerofn.shard(
        zerofn.TrainState.create(
            params=dict(module.named_parameters()), tx=optim.sgd(0.1), extra=dict(module.named_buffers())
        )
    )
    batch = torch.randn(6, 4)
    plain, pure = captured(step, state, batch, canonicalize), captured(step, state, batch, canonicalize, functionalize)
    assert_same_trees(results(pure, state, batch), results(plain, state, batch))
    assert len(roots(pure.gm.graph)) <= len(roots(plain.gm.graph))


def in_place_operations():
    """Every overload of ATen's whose name says that it writes to its first argument, and whose schema does."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        if namespace == "aten" and name.endswith("_") and not name.endswith("__") and schema.is_mutable:
            packet, overload = getattr(torch.ops.aten, name), schema.overload_name or "default"
            if overload in packet.overloads():
                yield getattr(packet, overload)


def test_every_in_place_operation_is_paired_with_one_of_its_own_arguments():
    found = {op: _out_of_place(op) for op in in_place_operations()}
    pairs = {op: pure for op, pure in found.items() if pure is not None}
    for op, pure in pairs.items():
        given, taken = op._schema.arguments, pure._schema.arguments
        assert [(x.name, str(x.type), x.kwarg_only) for x in given] == [
            (x.name, str(x.type), x.kwarg_only) for x in taken
        ]
        assert not pure._schema.is_mutable
        assert [str(x.type) for x in pure._schema.returns] == ["Tensor"]
    assert len(pairs) > 150
    assert pairs[torch.ops.aten.pow_.Scalar] is torch.ops.aten.pow.Tensor_Scalar
    assert found[torch.ops.aten.t_.default] is None  # a view is no new value


class Compared(TorchDispatchMode):
    """Runs each in-place operation beside its pair, and collects those that give other bits."""

    def __init__(self):
        super().__init__()
        self.compared, self.wrong = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        pure = _out_of_place(func)
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        expected = None if pure is None or drawn else pure(*args, **kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and isinstance(expected, torch.Tensor) and out.dtype == expected.dtype:
            self.compared.add(func)
            if not torch.equal(out.nan_to_num(), expected.nan_to_num()):
                self.wrong.add(func)
        return out


@pytest.mark.filterwarnings("ignore")
def test_a_pair_computes_what_the_in_place_operation_writes():
    compared = Compared()
    for info in OPERATIONS:
        if info.inplace_variant is None:
            continue
        for sample in itertools.islice(samples(info), 2):
            with contextlib.suppress(Exception), compared:
                info.inplace_variant(sample.input, *sample.args, **sample.kwargs)
    assert compared.wrong == set()
    assert len(compared.compared) > 100


def doubled_in_a_list(h):
    twice = h * 1
    torch._foreach_mul_([twice], 2.0)
    return twice.sum()


NORMS = {
    "x **= 2": lambda h: (h * 1).__ipow__(2).sum(),
    "pow_ of a tensor": lambda h: (h * 1 + 2).pow_(h.detach()).sum(),
    "float_power_": lambda h: (h * 1).float_power_(2).sum(),
    "norm(3)": lambda h: h.norm(3),
    "vector_norm(2.5)": lambda h: torch.linalg.vector_norm(h, 2.5, -1).mean(),
    "normalize(4)": lambda h: F.normalize(h, p=4, dim=-1)[:, 0].sum(),
    "pairwise_distance(3)": lambda h: F.pairwise_distance(h, h.flip(0), 3).mean(),
    "a list of one": doubled_in_a_list,
    "transpose_": lambda h: ((h * 2).transpose_(0, 1) * h.t()).sum(),
    "unsqueeze_, as_strided_": lambda h: ((h * 2).unsqueeze_(0).as_strided_((2, 3), (4, 1)) * h[:2, :3]).sum(),
    "floor_divide_": lambda h: (h + h.detach().mul_(7).floor_divide_(torch.tensor(2.0))).sum(),
}


@pytest.mark.parametrize("loss_fn", NORMS.values(), ids=NORMS.keys())
def test_powers_in_place_and_norms_give_the_bits_of_plain_torch(loss_fn):
    def step(state, x):
        loss, grads = state.value_and_grad(lambda p, x: loss_fn(x @ p["w"]))(x)
        return state.apply_gradients(grads), (loss, grads["w"])

    w = torch.eye(4, dtype=torch.float64) + 0.1
    x = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    leaf = w.clone().requires_grad_()
    expected = loss_fn(x @ leaf)
    expected.backward()
    _, (loss, grad) = zerofn.compile(step)(zerofn.TrainState.create(params={"w": w}, tx=optim.sgd(0.1)), x)
    assert loss == expected.detach()
    assert torch.equal(grad, leaf.grad)
