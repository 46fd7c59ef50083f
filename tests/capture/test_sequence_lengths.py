"""Packed sequences in a captured step: lengths that are numbers are constants of it."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import rnn

import zerofn
from tests.support.captured_steps import assert_captured_is_eager
from tests.support.small_steps import step_with
from zerofn import optim


def loss_of(net, params, batch):
    first, lengths = net.batch_first, batch["lengths"]
    x = batch["x"] if first else batch["x"].transpose(0, 1)
    is_sorted = batch["sorted"]
    packed = rnn.pack_padded_sequence(x, lengths, first, enforce_sorted=is_sorted)
    out, h = functional_call(net, params, (packed,))
    y, n = rnn.pad_packed_sequence(out, first, padding_value=0.5, total_length=7)
    rows = y if first else y.transpose(0, 1)
    inside = torch.arange(rows.shape[1]) < n[:, None]
    return (rows.square().mean(-1) * (1 + inside)).sum() + sum(x.sum() for x in (h if type(h) is tuple else [h]))


def stepping(net, loss):
    step = step_with(lambda p, b: loss(net, p, b))

    def make_state():
        params = {k: v.detach().clone() for k, v in net.named_parameters()}
        return zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)), stage=3)

    return step, make_state


def batch_of(lengths):
    return {
        "x": torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)),
        "lengths": lengths,
        "sorted": tuple(lengths) != (2, 5, 1),
    }


@pytest.mark.part(kind=[nn.RNN])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"batch_first": True, "bidirectional": True, "num_layers": 2}),
        (nn.LSTM, {"proj_size": 2}),
        (nn.GRU, {"bidirectional": True}),
        (nn.RNN, {"batch_first": True, "nonlinearity": "relu"}),
    ],
)
def test_networks_of_packed_sequences_are_the_eager_ones(kind, options):
    step, make_state = stepping(kind(4, 3, **options), loss_of)
    assert_captured_is_eager(step, make_state, [batch_of((5, 3, 3)), batch_of([2, 5, 1])])


def of_a_list(net, params, batch):
    packed = rnn.pack_sequence([batch["x"][0], batch["x"][1, :3], batch["x"][2, :1]])
    return sum(y.square().mean() for y in rnn.unpack_sequence(functional_call(net, params, (packed,))[0]))


def of_constants(net, params, batch):
    lengths = torch.tensor([5, 4, 2])
    packed = rnn.pack_padded_sequence(batch["x"].transpose(0, 1), lengths).to(torch.float32)
    part = rnn.unpad_sequence(batch["x"], lengths, batch_first=True)[1]
    return functional_call(net, params, (packed,))[0].data.square().mean() + part.sum()


@pytest.mark.part(loss=[of_a_list])
@pytest.mark.parametrize("loss", [of_a_list, of_constants])
def test_captured_recurrent_networks_on_packed_sequences_are_eager_ones(loss):
    assert_captured_is_eager(*stepping(nn.GRU(4, 3), loss), [batch_of((5, 3, 1))])


def of_what_is_packed(net, params, batch):
    return functional_call(net, params, (batch["packed"],))[0].data.sum()


@pytest.mark.parametrize("loss", [loss_of, of_what_is_packed])
def test_lengths_that_are_tensors_of_the_batch_are_refused(loss):
    batch = batch_of(torch.tensor([5, 3, 1]))
    batch["packed"] = rnn.pack_padded_sequence(batch["x"], batch["lengths"], True)
    step, make_state = stepping(nn.GRU(4, 3), loss)
    step(make_state(), batch)
    with pytest.raises(zerofn.CaptureError, match="lengths as a list"):
        zerofn.compile(step)(make_state(), batch)
