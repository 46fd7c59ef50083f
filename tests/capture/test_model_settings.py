"""A model that branches on a draw in training is told by which of its settings."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.small_steps import step_with
from zerofn import optim
from zerofn.capture.model_settings import settings_behind


def drawn_mask(shape, probability):
    return np.random.rand(*shape) < probability


class Masked(nn.Module):
    """Masks inputs as SpecAugment does, in a function outside of the class, and skips a layer as LayerDrop does."""

    def __init__(self, config):
        super().__init__()
        self.config, self.layer = config, nn.Linear(4, 4)
        self.drop = getattr(config, "layer_drop", 0.0)
        self.own = 0.25

    def mask(self, x):
        if not getattr(self.config, "augment", True):
            return x
        if x.dim() > 1 and self.config.mask_prob > 0 and self.training:
            return x.masked_fill(torch.tensor(drawn_mask(x.shape, self.config.mask_prob)), 0)
        return x

    def skips(self):
        if self.training and self.drop > 0.0:
            return torch.rand(()) < self.drop
        return False

    def forward(self, x):
        x, skip = self.mask(x), False
        if self.training and self.drop > 0.0:
            skip = torch.rand(()) < self.drop
        if not skip:
            x = self.layer(x)
        if self.config.threshold > 0 and x.sum() > self.config.threshold:
            x = 2 * x
        return x


def failure(**settings):
    config = SimpleNamespace(**{"mask_prob": 0.0, "threshold": 0} | settings)
    module = Masked(config)
    step = step_with(lambda params, x: functional_call(module, params, (x,)).sum())

    state = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=optim.sgd(0.1))
    try:
        zerofn.compile(step)(zerofn.shard(state), torch.randn(2, 4))
    except zerofn.CaptureError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"mask_prob": 0.5},
            "Masked does so because of config.augment=True and config.mask_prob=0.5: build the model with "
            "augment=False or mask_prob=0.0.",
        ),
        ({"layer_drop": 0.5}, "Masked does so because of config.layer_drop=0.5: build the model with layer_drop=0.0."),
    ],
    ids=["a draw of NumPy's", "a branch on a draw"],
)
def test_the_setting_that_leads_to_a_draw_is_named(settings, told):
    settings = {"augment": True} | settings
    text = failure(**settings)
    assert text.endswith(told) or f"{told}\n" in text, text
    assert f"{__file__}:" in text
    off = told.split("build the model with ")[1].rstrip(".").split(" or ")
    for name, value in (x.split("=") for x in off):
        assert failure(**settings | {name: {"False": False, "0.0": 0.0}[value]}) == ""


def test_a_setting_of_none_is_the_cause_and_gets_its_default():
    norm = nn.BatchNorm1d(4, momentum=None)

    def step(state, batch):
        buffers = {name: x.clone() for name, x in state.extra.items()}

        def loss_fn(params, x):
            return functional_call(norm, {**params, **buffers}, x).sum()

        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads, extra=buffers), loss

    params, buffers = dict(norm.named_parameters()), dict(norm.named_buffers())
    state = zerofn.TrainState.create(params=params, tx=optim.sgd(0.1), extra=buffers)
    told = r"BatchNorm1d does so because of BatchNorm1d.momentum=None: build the model with momentum=0.1\."
    with pytest.raises(zerofn.CaptureError, match=told):
        zerofn.compile(step)(zerofn.shard(state), torch.randn(2, 4))


@pytest.mark.whole
def test_a_branch_that_is_the_models_own_is_no_setting():
    text = failure(threshold=3)
    assert "asks for the value of a tensor" in text and "because of" not in text
    assert "torch.where" in text


def test_what_no_module_asks_has_no_setting():
    assert settings_behind([(sys._getframe(), 1)]) == ""


@pytest.mark.whole
def test_a_model_of_transformers_names_its_configuration():
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16)
    config = M2M100Config(vocab_size=64, encoder_layers=1, decoder_layers=1, max_position_embeddings=16, **sizes)
    model = M2M100ForConditionalGeneration(config).train()
    params, rows = dict(model.named_parameters()), torch.randint(3, 60, (2, 8))
    step = step_with(lambda params, x: functional_call(model, params, (), {"input_ids": x, "labels": x}).loss)

    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)))
    told = "M2M100Encoder does so because of config.encoder_layerdrop=0.05: build the model with encoder_layerdrop=0.0"
    with pytest.raises(zerofn.CaptureError, match=told):
        zerofn.compile(step)(state, rows)
