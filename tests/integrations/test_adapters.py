"""PEFT's adapters under the Trainer: what it writes is what `PeftModel.from_pretrained` opens."""

import os

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.trainer_runs import MARKS
from zerofn.integrations.transformers import Trainer, TrainingArguments

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]


def base(width=32):
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48, hidden_size=width, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def lora(**more):
    return peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **more})


KINDS = {
    "lora": lora,
    "modules to save": lambda: lora(modules_to_save=["lm_head"]),
    "embeddings": lambda: lora(target_modules=["q_proj", "embed_tokens"]),
    "tokens": lambda: lora(trainable_token_indices=[5, 6]),
    "dora": lambda: lora(use_dora=True, bias="lora_only"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"],
                                  task_type="CAUSAL_LM"),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "adalora": lambda: peft.AdaLoraConfig(init_r=3, target_r=2, total_step=4, target_modules=["q_proj"],
                                          task_type="CAUSAL_LM"),
}  # fmt: skip


def adapted(kind="lora"):
    model = base()
    torch.manual_seed(5)
    return peft.get_peft_model(model, KINDS[kind]())


def two():
    model = adapted()
    torch.manual_seed(9)
    model.add_adapter("second", lora(target_modules=["k_proj"], r=3))
    model.set_adapter("second")
    return model


def rows(count=32):
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": x, "labels": x} for x in torch.randint(2, 48, (count, 8), generator=draw)]


def options(folder, **more):
    return {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "per_device_eval_batch_size": 4, "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
        "disable_tqdm": True, **more,
    }  # fmt: skip


def train(trainer, arguments, folder, model, resume=None, **more):
    made = trainer(model=model, args=arguments(**options(folder, **more)), train_dataset=rows(), eval_dataset=rows(8))
    made.train(resume_from_checkpoint=resume)
    return made


def theirs(folder, model, **more):
    return train(transformers.Trainer, transformers.TrainingArguments, folder, model, **more)


def ours(folder, model, **more):
    return train(Trainer, TrainingArguments, folder, model, **more)


def losses(trainer):
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


def saved_in(folder):
    """Return {file: names of tensors and values} of all adapters in a folder."""
    found = {}
    for parent, _, files in os.walk(folder):
        for file in files:
            path = os.path.join(parent, file)
            found[os.path.relpath(path, folder)] = load_file(path) if file.endswith("safetensors") else None
    return found


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(torch.arange(2, 14).view(2, 6)).logits.float()


@pytest.mark.part(kind=["modules to save"])
@pytest.mark.parametrize("kind", [*KINDS, "two"])
def test_an_adapter_is_saved_as_peft_saves_it(tmp_path, kind):
    make = two if kind == "two" else lambda: adapted(kind)
    plain, mine = theirs(tmp_path / "a", make()), ours(tmp_path / "b", make())
    assert losses(mine) == pytest.approx(losses(plain), rel=1e-5)
    for trainer, name in ((plain, "a"), (mine, "b")):
        trainer.save_model(str(tmp_path / name / "saved"))
    files, expected = (saved_in(tmp_path / name / "saved") for name in ("b", "a"))
    assert files.keys() == expected.keys()
    for file, tensors in expected.items():
        torch.testing.assert_close(files[file], tensors, rtol=1e-4, atol=1e-6)
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "b" / "saved" / ("second" if kind == "two" else ""))
    torch.testing.assert_close(logits(again), logits(plain.model), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(mine.model), logits(again), rtol=1e-5, atol=1e-6)


SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.whole
def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    first = ours(tmp_path / "cut", adapted(), **SAVING)
    peft.PeftModel.from_pretrained(base(), tmp_path / "cut" / "checkpoint-2")
    again = ours(tmp_path / "cut", adapted(), resume=str(tmp_path / "cut" / "checkpoint-2"), **SAVING)
    assert losses(again) == losses(first)


@pytest.mark.whole
@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("make", [adapted, two])
def test_a_run_ends_with_its_best_model(tmp_path, make, only):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    found = ours(tmp_path, make(), save_only_model=only, **SAVING, **evaluating, **best)
    assert found.state.best_global_step == 2  # the largest loss is the first
    folder = os.path.join(found.state.best_model_checkpoint, "second" if make is two else "")
    kept = peft.PeftModel.from_pretrained(base(), folder)
    torch.testing.assert_close(logits(found.model), logits(kept), rtol=1e-5, atol=1e-6)


def test_merged_weights_open_without_peft(tmp_path):
    plain, mine = theirs(tmp_path / "a", adapted()), ours(tmp_path / "b", adapted())
    expected = logits(plain.model)
    mine.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-5)


def test_weights_that_the_adapter_replaces_while_the_model_runs_are_a_sentence(tmp_path):
    model = peft.get_peft_model(base(), lora(target_modules=[], target_parameters=["mlp.up_proj.weight"]))
    with pytest.raises(ValueError, match="target_parameters.*target_modules"):
        ours(tmp_path, model)


def on_ranks(folder, count):
    trainer = ours(folder, adapted("modules to save"), per_device_train_batch_size=4 // count, max_steps=3)
    trainer.save_model(f"{folder}/saved")
    with trainer.whole_model():
        merged = trainer.model.merge_and_unload()
        if trainer.args.should_save:
            merged.save_pretrained(f"{folder}/merged")
    return losses(trainer)


@pytest.mark.whole
@pytest.mark.parametrize("count", [2, 4])
def test_matrices_smaller_than_a_shard_on_ranks(ranks, tmp_path, count):
    """LoRA's matrices have 64 elements, and a shard is a multiple of 2,048."""
    plain = theirs(tmp_path / "plain", adapted("modules to save"), max_steps=3)
    found = ranks(count, on_ranks, tmp_path, count, group=False)[0]
    assert found == pytest.approx(losses(plain), rel=1e-5)
    for again in (
        peft.PeftModel.from_pretrained(base(), tmp_path / "saved"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
    ):
        torch.testing.assert_close(logits(again), logits(plain.model), rtol=1e-4, atol=1e-5)
