"""Captured operations promise the strides that they really give, for inputs in any memory order."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Interpreter

import zerofn
from tests.support.op_samples import OPERATIONS, samples
from zerofn import optim
from zerofn._torch_compat import below_autograd, make_fx
from zerofn.tracing.shortcut import Shortcut
from zerofn.tracing.strides import _in_order, _shrunk

# Draws and what depends on values, on hidden state or on unfilled memory: nothing to compare.
LEFT_OUT = set(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided normal randn_like rand_like "
    "randint_like bernoulli multinomial argwhere index_fill tensor_split nn.functional.fractional_max_pool2d "
    "nn.functional.fractional_max_pool3d nn.functional.feature_alpha_dropout "
    "nn.functional.multi_head_attention_forward nn.functional.rrelu "
    "nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d "
    "nn.functional.alpha_dropout nn.functional.scaled_dot_product_attention uniform exponential geometric log_normal "
    "cauchy sgn _segment_reduce".split()  # sgn: a constant of its derivative stays fake in make_fx; the last reads as
    # many rows as its offsets say
)
KNOWN = [x for x in OPERATIONS if x.name not in LEFT_OUT and not x.name.startswith("sparse")]
# Those whose fake kernels are known to promise other strides, and some that do not.
QUICK = (
    "nn.functional.elu nn.functional.logsigmoid nn.functional.hardtanh nn.functional.softplus logit "
    "nn.functional.batch_norm nn.functional.max_pool1d nn.functional.huber_loss nn.functional.binary_cross_entropy "
    "nn.functional.layer_norm nn.functional.conv1d cumsum softmax matmul sort"
).split()


# Of families that networks hardly use, every third operation; of all others, those that are not in QUICK.
RARE = ("fft.", "linalg.", "masked.", "signal.", "special.")
OFTEN = [x for x in KNOWN if not x.name.startswith(RARE) and x.name not in QUICK]
DATABASE = OFTEN + [x for x in KNOWN if x.name.startswith(RARE)][::3]


def permuted(x):
    """The same values, with the first and the last dim exchanged in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def rolled(x):
    """The same values, with the last dim first in memory, as channels last."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else permuted(x)


def strided(x):
    """The same values, with gaps."""
    return torch.stack([x, x], -1)[..., 0]


def expanded(x):
    """The first row, repeated without memory."""
    return x[:1].expand_as(x)


FORMS = (permuted, rolled, strided, expanded)


class Compared(Interpreter):
    """Runs a graph, and collects the nodes whose real strides are not those that it tells."""

    def __init__(self, gm):
        super().__init__(gm, garbage_collect_values=False)
        self.found = []

    def run_node(self, node):
        out = super().run_node(node)
        told = node.meta.get("val")
        several = isinstance(out, tuple | list) and isinstance(told, tuple | list)
        pairs = zip(out, told, strict=True) if several else [(out, told)]
        for real, promised in pairs:
            if isinstance(real, torch.Tensor) and isinstance(promised, torch.Tensor) and real.numel():
                big = [d for d in range(real.dim()) if real.shape[d] > 1]  # a dim of one element has no stride
                if [real.stride(d) for d in big] != [promised.stride(d) for d in big]:
                    self.found.append(f"{node.target}: real {real.stride()}, promised {promised.stride()}")
        return out


def with_gradient(f, which, reorder):
    """`f`, and its gradients. With `reorder` they come in row-major order, whatever the order of the results."""

    def run(*xs):
        leaves = [x.detach().requires_grad_() if k in which else x for k, x in enumerate(xs)]
        out = f(*leaves)
        outs = [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, torch.Tensor)]
        ends = [o.contiguous() if reorder else o for o in outs if o.requires_grad]
        total = [o * torch.linspace(0, 1, o.numel()).view(o.shape).to(o.dtype) for o in ends]
        if not total:
            return [o.detach() for o in outs]
        wanted = [leaves[k] for k in which]
        grads = torch.autograd.grad(sum(t.sum() for t in total), wanted, allow_unused=True)
        # a copy that is left out is a difference in the elements that a view reads
        flat = [o.detach().contiguous().view(-1) for o in (*outs, *(g for g in grads if g is not None))]
        return flat

    return run


def differences(info, form, reorder, most=2):
    """Wrong promises, and wrong values, of an operation's samples with inputs in this form."""
    found = []
    for number, sample in enumerate(samples(info)):
        if number >= most:
            break
        tensors = [x for x in (sample.input, *sample.args) if isinstance(x, torch.Tensor)]
        if not isinstance(sample.input, torch.Tensor) or not any(x.numel() for x in tensors):
            most += number < 20  # the next one may have elements
            continue
        rest = [None if isinstance(x, torch.Tensor) else x for x in sample.args]

        def f(*xs, rest=rest, sample=sample):
            given = iter(xs[1:])
            return info.op(xs[0], *(next(given) if x is None else x for x in rest), **sample.kwargs)

        if any(x is None for x in sample.args):
            continue
        torch.manual_seed(0)
        if not any(x.dim() > 1 for x in tensors):  # many elementwise operations have samples of one dim alone
            tensors = [torch.stack([x, x, x]) if x.dim() else x for x in tensors]
        inputs = [form(x.detach()) if x.dim() > 1 else x.detach() for x in tensors]
        which = [k for k, x in enumerate(inputs) if x.is_floating_point()] if info.supports_autograd else []
        run = with_gradient(f, which, reorder)
        try:
            expected = run(*inputs)
        except Exception:  # not an input of this operation
            continue

        def traced(*xs, run=run):
            with Shortcut():
                return run(*xs)

        try:
            gm = make_fx(traced, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        except Exception as error:
            if any(x in str(type(error)) + str(error) for x in ("DataDependent", "DynamicOutputShape", "Unsupported")):
                continue
            found.append(f"sample {number}: not captured: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        compared = Compared(gm)
        try:
            with torch.no_grad(), below_autograd():
                got = compared.run(*inputs)
        except Exception as error:
            found.append(f"sample {number}: does not run: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        found += [f"sample {number}: {x}" for x in compared.found]
        for a, b in zip(expected, got, strict=True):
            if not torch.allclose(a, b, equal_nan=True, rtol=1e-5, atol=1e-6):
                found.append(f"sample {number}: other values")
    return found


def _named(infos):
    return [pytest.param(x, id=f"{x.name}.{x.variant_test_name}".rstrip(".")) for x in infos]


@pytest.mark.part(reorder=[False])
@pytest.mark.part(form=FORMS[:1])
@pytest.mark.parametrize("info", _named(x for x in KNOWN if x.name in QUICK))
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("reorder", [False, True], ids=["as given", "then contiguous"])
def test_known_operations_promise_the_strides_that_they_give(info, form, reorder):
    assert differences(info, form, reorder) == []


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("form", [permuted], ids=lambda f: f.__name__)
def test_operations_of_torchs_database_promise_the_strides_that_they_give(form):
    found = {f"{x.name} {x.variant_test_name}": differences(x, form, True, most=1) for x in DATABASE}
    assert {k: v for k, v in found.items() if v} == {}


@pytest.mark.parametrize(
    ("shape", "strides", "small"),
    [
        ((100, 8, 200), (1600, 200, 1), ((16, 8, 32), (256, 32, 1))),
        ((100, 8, 200), (1, 20000, 100), ((16, 8, 32), (1, 512, 16))),
        ((100, 200), (0, 1), ((16, 32), (0, 1))),
        ((100, 200), (400, 2), ((16, 32), (64, 2))),
    ],
    ids=["row-major", "last dim outermost", "repeated", "with gaps"],
)
def test_a_small_layout_keeps_order_gaps_and_repetitions(shape, strides, small):
    assert _shrunk(shape, strides, {100: 16, 200: 32, 8: 8}.__getitem__) == small


def test_elements_that_overlap_have_no_small_layout():
    with pytest.raises(ValueError, match="overlap"):
        _shrunk((5, 4), (1, 1), lambda n: n)


def test_dense_strides_in_an_order():
    assert _in_order((2, 3, 4), (1, 8, 2)) == (1, 8, 2)
    assert _in_order((2, 3, 4), (100, 10, 1)) == (12, 4, 1)


def _linear_attention(params, batch):
    q, k, v = (batch["x"] @ params[name] for name in "qkv")
    q, k = (F.elu(t.unflatten(-1, (2, -1)).transpose(1, 2)) + 1 for t in (q, k))
    v = v.unflatten(-1, (2, -1)).transpose(1, 2)
    out = q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2))
    return (out.transpose(1, 2).flatten(2) - batch["y"]).square().mean()


def _log_of_a_product(params, batch):
    h = (batch["x"] @ params["q"]).transpose(1, 2).contiguous().transpose(1, 2)
    h = F.logsigmoid(h).contiguous().view(-1, 8)
    return (F.max_pool1d(h.t()[None], 2) * F.hardtanh(params["k"].t()).sum()).square().mean()


def _normalized_images(params, batch):
    x = (batch["x"] @ params["q"]).transpose(1, 2)
    x = F.batch_norm(x, None, None, training=True)
    x = F.rrelu(F.softplus(x).contiguous().view(-1, 8) @ params["k"], training=False)
    return (x.view(-1)[: batch["y"].numel()] * batch["y"].reshape(-1)).mean()


def _normalized_rows(params, batch):
    """Of a batch, whose gradient torch's kernel leaves out."""
    scale, shift = params["q"][0], params["k"][0]
    return F.batch_norm(batch["x"].transpose(1, 2), None, None, scale, shift, training=True).square().mean()


@pytest.mark.part(loss_fn=[_linear_attention, _normalized_rows])
@pytest.mark.parametrize("loss_fn", [_linear_attention, _log_of_a_product, _normalized_images, _normalized_rows])
def test_a_compiled_step_reads_the_elements_that_plain_torch_reads(loss_fn):
    draw = torch.Generator().manual_seed(0)
    params = {name: torch.randn(8, 8, generator=draw) for name in "qkv"}
    batch = {name: torch.randn(3, 5, 8, generator=draw) for name in "xy"}

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), {"loss": loss, "grads": grads}

    plain = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = loss_fn(plain, batch)
    grads = torch.autograd.grad(loss, list(plain.values()), allow_unused=True)
    state = zerofn.TrainState.create(params={name: p.clone() for name, p in params.items()}, tx=optim.sgd(0.1))
    _, aux = zerofn.compile(step)(state, batch)
    torch.testing.assert_close(aux["loss"], loss.detach(), rtol=0, atol=0)
    for got, expected in zip(aux["grads"].values(), grads, strict=True):
        torch.testing.assert_close(got, torch.zeros(8, 8) if expected is None else expected, rtol=0, atol=0)
