"""The names that a Trainer's files have are those of transformers' own."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from zerofn.integrations.transformers import Trainer, TrainingArguments


def a_picture_model():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def a_model_of_experts():
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def pictures():
    torch.manual_seed(1)
    return [{"pixel_values": torch.randn(3, 8, 8), "labels": k % 2} for k in range(8)]


def sentences():
    return [{"input_ids": [k, 3, 5, 7], "labels": [k, 3, 5, 7]} for k in range(8)]


def trained(library, folder, build, rows, **more):
    given = {"max_steps": 2, "save_steps": 1, "report_to": "none", "use_cpu": True, "seed": 0, "learning_rate": 0.1}
    args = library.TrainingArguments(output_dir=str(folder), save_only_model=True, **given, **more)
    torch.manual_seed(0)
    trainer = library.Trainer(build(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return trainer


class ours:
    Trainer, TrainingArguments = Trainer, TrainingArguments


@pytest.mark.part(build=[a_model_of_experts])
@pytest.mark.parametrize("build, rows", [(a_picture_model, pictures), (a_model_of_experts, sentences)])
def test_files_open_as_the_model_that_was_trained(tmp_path, build, rows):
    mine, plain = (trained(x, tmp_path / x.__name__, build, rows()) for x in (ours, transformers))
    folder = tmp_path / "ours" / "checkpoint-2"
    opened = type(mine.model).from_pretrained(folder)
    with mine.whole_model():
        for name, value in mine.model.state_dict().items():
            assert torch.equal(value, opened.state_dict()[name]), name
    found, expected = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "transformers" / "checkpoint-2"))
    if build is a_picture_model:  # transformers cuts experts as it writes them
        assert found.keys() == expected.keys()
    for name in found.keys() & expected.keys():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_the_best_model_is_read_under_these_names(tmp_path):
    more = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = trained(ours, tmp_path, a_picture_model, pictures(), **more)
    best = min(x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x)
    assert trainer.evaluate()["eval_loss"] == best
