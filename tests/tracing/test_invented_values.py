"""Only operations whose results are defined by their tensors' elements are run on values that nobody computed."""

import contextlib

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.op_samples import OPERATIONS, samples
from zerofn import optim
from zerofn._torch_compat import FakeTensorMode, TorchDispatchMode
from zerofn.tracing import strides
from zerofn.tracing.invented_values import is_defined, takes_any_values
from zerofn.util.nested_arguments import tensors_in, with_tensors

aten = torch.ops.aten
LSTMS = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "batch first": {"batch_first": True},
    "two layers, batch first": {"num_layers": 2, "batch_first": True},
    "both directions": {"bidirectional": True},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
}


@pytest.mark.part(kind=[nn.GRU], options=[LSTMS["two layers, both directions"]])
@pytest.mark.part(kind=[nn.RNN], options=[LSTMS["two layers, batch first"]])
@pytest.mark.part(kind=[nn.LSTM], options=[LSTMS["one layer"], LSTMS["batch first"]])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda x: x.__name__)
@pytest.mark.parametrize("options", LSTMS.values(), ids=LSTMS.keys())
def test_a_captured_recurrent_network_gives_the_bits_of_plain_torch(kind, options):
    torch.manual_seed(0)
    model, x = kind(4, 3, **options), torch.randn(5, 20, 4)

    def loss_fn(params, x):
        return functional_call(model, params, (x,))[0].square().mean()

    def step(state, x):
        loss, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads), (loss, grads)

    params = dict(model.named_parameters())
    expected = loss_fn(params, x)
    gradients = torch.autograd.grad(expected, list(params.values()))
    _, (loss, found) = zerofn.compile(step)(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)), x)
    assert torch.equal(loss, expected.detach())
    assert all(torch.equal(found[name], g) for name, g in zip(params, gradients, strict=True))


@pytest.mark.parametrize(
    "op",
    [
        aten.mkldnn_rnn_layer.default,
        aten.mkldnn_rnn_layer_backward.default,
        aten._cudnn_rnn.default,
        aten._cudnn_rnn_backward.default,
        aten.lu_unpack.default,
        aten.linalg_ldl_solve.default,
        aten._ctc_loss_backward.default,
        aten.segment_reduce.default,
        torch.ops.zerofn.wait.default,
    ],
    ids=str,
)
def test_kernels_that_believe_their_arguments_are_not_run(op):
    assert not is_defined(op)


def test_bytes_are_a_workspace_except_to_elementwise_operations():
    bytes_, x = torch.zeros(4, dtype=torch.uint8), torch.zeros(4)
    assert takes_any_values(aten.add.Tensor, [bytes_, bytes_])
    assert not takes_any_values(aten.native_batch_norm_backward.default, [x, bytes_])
    assert not takes_any_values(aten.mm.default, [torch.ones(2, 2).to_sparse(), torch.ones(2, 2)])


def test_zeros_are_indices_only_where_there_is_something_to_index():
    index = torch.zeros(2, dtype=torch.int64)
    assert takes_any_values(aten.embedding.default, [torch.zeros(3, 2), index])
    assert not takes_any_values(aten.embedding.default, [torch.zeros(0, 2), index])


def test_a_count_that_is_no_size_keeps_a_trial_at_full_size(monkeypatch):
    """`native_group_norm` is told how many elements there are; its kernel believes that, not its tensors."""
    tried = []
    monkeypatch.setattr(strides._Trial, "run", lambda self, *args: tried.append(self.shrink) or 1 / 0)
    group_norm = aten.native_group_norm.default
    with FakeTensorMode():
        x, image = torch.empty(40, 20, 50).transpose(1, 2), torch.empty(40, 20, 20, 50).movedim(-1, 1)
        strides.real_strides(group_norm, (x, None, None, 40, 50, 20, 5, 1e-5), {}, (x, x, x))
        assert len(tried) == 2 and tried[0](40) < 40 and tried[1] is None
        strides.real_strides(group_norm, (image, None, None, 40, 50, 400, 5, 1e-5), {}, (x, x, x))
    assert tried[2:] == [None]


class Tried(TorchDispatchMode):
    """Runs every operation once more on zeros, if that is allowed."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if tensors and torch.Tag.nondeterministic_seeded not in func.tags and takes_any_values(func, tensors):
            self.found.add(func)
            with contextlib.suppress(RuntimeError, IndexError, ValueError):  # a refusal is an answer
                func(*with_tensors(args, torch.zeros_like), **with_tensors(kwargs, torch.zeros_like))
        return out


@pytest.mark.filterwarnings("ignore")
def test_operations_of_torchs_database_that_may_be_tried_survive_zeros():
    tried = Tried()
    for info in OPERATIONS:
        sample = next(samples(info, info.supports_autograd))
        with contextlib.suppress(Exception), tried:
            results = tensors_in(info.op(sample.input, *sample.args, **sample.kwargs))
            ends = [x for x in results if x.requires_grad]
            torch.autograd.grad(ends, [sample.input], [torch.ones_like(x) for x in ends])
    assert len(tried.found) > 300
