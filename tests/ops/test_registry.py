"""What is known of an operation: ours must say it, ATen's follows from schema and tags, of others nothing is known."""

import contextlib

import pytest
import torch

import zerofn
from tests.support.op_samples import OPERATIONS, samples
from tests.support.small_steps import build, state_of
from zerofn import tree
from zerofn._torch_compat import TorchDispatchMode, storage_key
from zerofn.capture.capture import CaptureError
from zerofn.ops.registry import UNKNOWN, OnShard, Traits, argument_places, define, traits_of, written_arguments
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
