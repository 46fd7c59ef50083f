"""What is known of an operation: ours must say it, ATen's follows from schema and tags, of others nothing is known."""

import contextlib

import pytest
import torch

import zerofn
from tests.support.op_samples import OPERATIONS, samples
from tests.support.same import assert_same_trees
from tests.support.small_steps import build, state_of
from zerofn import tree
from zerofn._torch_compat import TorchDispatchMode, storage_key, tree_map
from zerofn.capture.capture import CaptureError
from zerofn.ops.registry import (
    TORCH_FUNCTIONS,
    UNKNOWN,
    OnShard,
    Traits,
    argument_places,
    define,
    traits_of,
    written_arguments,
)
from zerofn.util.nested_arguments import tensors_in

ops, aten = torch.ops.zerofn, torch.ops.aten

custom = torch.library.Library("registry_test", "FRAGMENT")
for name, tags in (("doubled", ()), ("tagged", (torch.Tag.pointwise,))):
    custom.define(f"{name}(Tensor x) -> Tensor", tags=tags)
    custom.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake(f"registry_test::{name}", torch.empty_like, lib=custom)


def test_ours_cannot_be_defined_without_traits():
    with pytest.raises(TypeError, match="traits"):
        define("nothing_said(Tensor x) -> Tensor", lambda x: x, lambda x: x)


def test_overloads_have_one_set_of_traits():
    with pytest.raises(ValueError, match="one set of traits"):
        define("wait.again(Tensor x) -> Tensor", lambda x: x, lambda x: x, traits=Traits(OnShard.REFUSED))


def test_every_operation_of_ours_says_what_becomes_of_a_shard():
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "zerofn::" in name}
    assert len(names) > 40
    for name in names:
        packet = getattr(ops, name)
        for overload in packet.overloads():
            assert isinstance(traits_of(getattr(packet, overload)).on_shard, OnShard)


@pytest.mark.parametrize(
    ("op", "on_shard"),
    [
        (aten.mul.Tensor, OnShard.KEEPS),
        (aten.add_.Tensor, OnShard.KEEPS),
        (aten.where.self, OnShard.KEEPS),
        (aten.zeros_like.default, OnShard.SHAPE),
        (aten.sum.default, OnShard.REFUSED),
        (aten.mm.default, OnShard.REFUSED),
        (ops.adamw.default, OnShard.KEEPS),
        (ops.reduce_scatter.default, OnShard.MAKES),
        (ops.all_gather.default, OnShard.LEAVES),
    ],
    ids=str,
)
def test_what_becomes_of_a_shard(op, on_shard):
    assert traits_of(op).on_shard is on_shard


def test_of_other_operations_nothing_is_known():
    assert traits_of(torch.ops.registry_test.doubled.default) is UNKNOWN
    assert traits_of(torch.ops.registry_test.tagged.default).on_shard is OnShard.KEEPS
    assert traits_of(len) is UNKNOWN


def test_arguments_have_the_schemas_places():
    assert argument_places(aten.slice.Tensor) == {
        "self": (0, None),
        "dim": (1, 0),
        "start": (2, None),
        "end": (3, None),
        "step": (4, 1),
    }


def step_with(op, gathered):
    def train_step(state, batch):
        def loss_fn(params, x):
            weight = params["0.weight"]
            return (op(weight.detach()) * weight).sum() * x.sum() if gathered else (weight * x.sum()).sum()

        loss, grads = state.value_and_grad(loss_fn)(batch)
        if not gathered:
            grads = tree.tree_map(op, grads)
        return state.apply_gradients(grads), loss

    return train_step


def test_a_custom_operation_on_a_shard_is_refused_and_on_gathered_values_runs():
    doubled, tagged = torch.ops.registry_test.doubled, torch.ops.registry_test.tagged
    batch = torch.ones(2)
    with pytest.raises(CaptureError, match=r"registry_test::doubled.*differ from rank.*tags=torch.Tag.pointwise"):
        zerofn.compile(step_with(doubled, gathered=False))(state_of(build(4), 3), batch)
    for op, gathered in ((doubled, True), (tagged, False)):
        state, loss = zerofn.compile(step_with(op, gathered))(state_of(build(4), 3), batch)
        plain, expected = step_with(op, gathered)(state_of(build(4), 3), batch)
        assert torch.equal(loss, expected)
        for a, b in zip(
            tree.leaves(zerofn.unshard(state.params)), tree.leaves(zerofn.unshard(plain.params)), strict=True
        ):
            assert torch.equal(a, b)


def bits(x):
    return x.resolve_conj().resolve_neg().clone().reshape(-1).contiguous().view(torch.uint8)


class Effects(TorchDispatchMode):
    """Collects the operations that write to an argument of which the registry does not say so."""

    def __init__(self):
        super().__init__()
        self.seen, self.wrote = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tensors_in((args, kwargs)) if x.layout is torch.strided and not x._is_zerotensor()]
        before = [bits(x) for x in given]
        out = func(*args, **kwargs)
        self.seen.add(func)
        written = {storage_key(x) for x in tensors_in(written_arguments(func, args, kwargs))}
        for x, was in zip(given, before, strict=True):
            if storage_key(x) not in written and not torch.equal(bits(x), was):
                self.wrote.add(func)
        return out


@pytest.mark.filterwarnings("ignore")
def test_the_registry_knows_every_write_of_torchs_operations():
    effects = Effects()
    for info in OPERATIONS:
        sample = next(samples(info, info.supports_autograd))
        with contextlib.suppress(Exception), effects:
            results = tensors_in(info.op(sample.input, *sample.args, **sample.kwargs))
            ends = [x for x in results if x.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
    assert effects.wrote == set()
    assert len(effects.seen) > 400


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_writes_its_statistics_in_training(training):
    x, weight, mean, var = torch.randn(4, 3), torch.ones(3), torch.zeros(3), torch.ones(3)
    args = (x, weight, weight, mean, var, training, 0.1, 1e-5)
    assert written_arguments(aten.native_batch_norm.default, args, {}) == ([mean, var] if training else [])


# ---- torch's own functions, which run operations


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# Every argument of a schema at least once, with a value of its own.
CALLS = {
    aten.add.Tensor: [
        ((drawn(3, 4), drawn(4)), {"alpha": 3}),
        ((drawn(3, 4), 2), {}),
        ((drawn(3).half(), drawn(3)), {}),
    ],
    aten.sub.Tensor: [((drawn(3, 4), drawn(4)), {"alpha": 3}), ((drawn(3, 4), 0.5), {})],
    aten.mul.Tensor: [((drawn(3, 4), drawn(4)), {}), ((drawn(3, 4).bfloat16(), 0.3), {}), ((torch.arange(3), 0.5), {})],
    aten.div.Tensor: [((drawn(3, 4), drawn(4)), {}), ((drawn(3, 4), 3), {}), ((torch.arange(3), 2), {})],
    aten.mm.default: [((drawn(3, 4), drawn(4, 5)), {})],
    aten.bmm.default: [((drawn(2, 3, 4), drawn(2, 4, 5)), {})],
    aten.addmm.default: [((drawn(5), drawn(3, 4), drawn(4, 5)), {"beta": 2, "alpha": 0.5})],
    aten.neg.default: [((drawn(3),), {})],
    aten.rsqrt.default: [((drawn(3).abs(),), {})],
    aten.sigmoid.default: [((drawn(30),), {}), ((drawn(30).bfloat16(),), {})],
    aten.tanh.default: [((drawn(30),), {})],
    aten.exp.default: [((drawn(30),), {})],
    aten.cos.default: [((drawn(30),), {})],
    aten.sin.default: [((drawn(30),), {})],
    aten.pow.Tensor_Scalar: [((drawn(30), 3), {}), ((drawn(30).abs(), 0.7), {})],
    aten.gelu.default: [((drawn(30),), {}), ((drawn(30),), {"approximate": "tanh"})],
    aten.sum.default: [((drawn(3, 4),), {}), ((drawn(3, 4),), {"dtype": torch.float64})],
    aten.sum.dim_IntList: [((drawn(3, 4, 5), [0, 2], True), {"dtype": torch.float64}), ((drawn(3, 4), None), {})],
    aten.mean.dim: [((drawn(3, 4, 5), [0, 2], True), {"dtype": torch.float64}), ((drawn(3, 4), [-1]), {})],
    aten.native_layer_norm.default: [
        ((drawn(3, 4), [4], drawn(4), drawn(4) + 1, 0.1), {}),
        ((drawn(3, 4), [4], None, None, 1e-5), {}),
    ],
    aten.embedding.default: [((drawn(5, 3), torch.tensor([[4, 0], [1, 1]]), 2, True, False), {})],
    aten.where.self: [((drawn(3) > 0, drawn(3), drawn(1)), {})],
    aten.cat.default: [(([drawn(3, 4), drawn(3, 2)], 1), {})],
    aten.clone.default: [((drawn(4, 3).t(),), {}), ((drawn(4, 3).t(),), {"memory_format": torch.contiguous_format})],
    aten.copy_.default: [((drawn(3, 4), drawn(4).double(), True), {})],
    aten.view.default: [((drawn(3, 4), [2, -1]), {})],
    aten.expand.default: [((drawn(3, 1), [2, -1, 4]), {}), ((drawn(3, 1), [3, 4]), {"implicit": True})],
    aten.permute.default: [((drawn(3, 4, 5), [2, 0, 1]), {})],
    aten.t.default: [((drawn(3, 4),), {})],
    aten.transpose.int: [((drawn(3, 4, 5), 0, -1), {})],
    aten.select.int: [((drawn(3, 4, 5), 1, 3), {})],
    aten.squeeze.dim: [((drawn(3, 1, 1), 1), {})],
    aten.unsqueeze.default: [((drawn(3, 4), 1), {})],
}
INTO_MEMORY = {  # the same arguments, and memory for the result
    getattr(getattr(aten, op.overloadpacket.__name__), overload): op
    for op in CALLS
    for overload in ("out", "IntList_out", "Tensor_Scalar_out")
    if getattr(getattr(aten, op.overloadpacket.__name__), overload, None) in TORCH_FUNCTIONS
}
CALLS |= {op: CALLS[pure][:1] for op, pure in INTO_MEMORY.items()}


class Called(TorchDispatchMode):
    """Notes the operations that run, with their arguments."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def called(run, args, kwargs):
    with Called() as mode:
        run(*args, **kwargs)
    return mode.found


def copies(op, args, kwargs):
    """Arguments with memory of their own, of the same strides."""
    fresh = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
    if op in INTO_MEMORY:
        like = INTO_MEMORY[op]._op(*args, **kwargs)
        fresh[1]["out"] = torch.full_like(like, 7)
    return fresh


def test_every_function_of_torchs_is_tried():
    assert set(CALLS) == set(TORCH_FUNCTIONS)


@pytest.mark.parametrize("op", TORCH_FUNCTIONS, ids=str)
def test_torchs_own_function_calls_just_its_operation_with_the_same_arguments(op):
    for args, kwargs in CALLS[op]:
        given = copies(op, args, kwargs)
        ours, theirs = called(TORCH_FUNCTIONS[op], *given), called(op._op, *given)
        assert [x[0] for x in ours] == [x[0] for x in theirs] == [op]
        assert_same_trees(ours[0][1:], theirs[0][1:])


@pytest.mark.parametrize("op", TORCH_FUNCTIONS, ids=str)
def test_torchs_own_function_gives_the_bits_of_its_operation(op):
    for args, kwargs in CALLS[op]:
        (first, named), (second, named_again) = copies(op, args, kwargs), copies(op, args, kwargs)
        ours, theirs = TORCH_FUNCTIONS[op](*first, **named), op._op(*second, **named_again)
        assert_same_trees(ours, theirs)
        assert_same_trees((first, named), (second, named_again))
        for x, y in zip(tensors_in(ours), tensors_in(theirs), strict=True):
            assert x.stride() == y.stride() and x.storage_offset() == y.storage_offset()
