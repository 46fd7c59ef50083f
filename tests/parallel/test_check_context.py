"""Models that are no other ones in parts of rows, and those that are."""

import logging

import pytest
import torch
import transformers
from torch import nn

from zerofn.comm.mesh import Mesh
from zerofn.parallel import context

TEXT = {
    "vocab_size": 67, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 36,
    "max_position_embeddings": 64, "decoder_attention_heads": 6,
}  # fmt: skip
MESH = Mesh.planned({"context": 2})


def made(name, **more):
    config = getattr(transformers, name.partition("For")[0] + "Config")
    with torch.device("meta"):
        return getattr(transformers, name)._from_config(config(**{**TEXT, **more}))


@pytest.mark.part(method=["ring"], name=["RobertaForMaskedLM"])
@pytest.mark.parametrize("name", ["RobertaForMaskedLM", "CamembertForTokenClassification", "XLMRobertaXLForMaskedLM"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_models_that_count_positions_from_their_padding_are_taken(caplog, name, method):
    context(made(name), MESH, method=method)
    assert not caplog.records


def test_a_model_whose_masks_hide_nothing_is_taken(caplog):
    context(made("BioGptForCausalLM"), MESH)
    assert not caplog.records


def test_layers_of_windows_are_taken_but_in_a_ring(caplog):
    windows = {
        "local_attention": 4,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
        "global_attn_every_n_layers": 2,
    }
    context(made("ModernBertForMaskedLM", **windows), MESH)
    assert not caplog.records
    context(made("ModernBertForMaskedLM", **windows), MESH, method="ring")
    assert not caplog.records


@pytest.mark.part(name=["FNetForMaskedLM", "DogeForCausalLM", "RobertaForSequenceClassification"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FNetForMaskedLM", "computes different values on parts of rows: its outputs are off by"),
        ("BartForCausalLM", "computes different values on parts of rows"),  # asks for no positions
        ("DogeForCausalLM", "needs a kind of attention that is neither full nor causal"),
        ("RobertaForSequenceClassification", r"returns \[2, 2\] for tokens \[2, 16\]"),
    ],
)
def test_a_model_that_parts_make_another_one_is_refused(name, message):
    with pytest.raises(ValueError, match=f"context: {name} .*{message}"):
        context(made(name), MESH)


def test_attention_that_is_code_of_its_own_is_refused():
    with pytest.raises(TypeError, match="^context: MegatronBertForMaskedLM computes attention in its own code"):
        context(made("MegatronBertForMaskedLM"), MESH)


class Centred(transformers.BertForMaskedLM):
    """Subtracts the mean over the row."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits - out.logits.mean(1, keepdim=True)
        return out


def test_a_class_of_ones_own_is_compared_by_its_own_forward():
    with torch.device("meta"):
        model = Centred._from_config(transformers.BertConfig(**TEXT))
    with pytest.raises(ValueError, match="Centred computes different values on parts of rows"):
        context(model, MESH)


def test_what_cannot_be_compared_is_told(caplog):
    model = made("BertForMaskedLM")
    model.cls.predictions.decoder = nn.Sequential(model.cls.predictions.decoder)
    with caplog.at_level(logging.WARNING, logger="zerofn"):
        context(model, MESH)
    assert "BertForMaskedLM was not tested on parts of rows" in caplog.text
