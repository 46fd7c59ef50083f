"""Trainings of transformers' Trainer as tests run them: tiny models and data, on the host, without a word."""

import pytest
import torch
import transformers

from zerofn.integrations.transformers import Trainer, TrainingArguments

STEPS = 5
MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning"),
]


def config():
    return transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.0, tie_word_embeddings=True,
    )  # fmt: skip


def build():
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config())


def t5_config(vocab_size):
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return transformers.T5Config(vocab_size=vocab_size, **shape, decoder_start_token_id=0, dropout_rate=0.0)


def rows(count=48, length=8, odd=False):
    """Token rows; `odd`: of many lengths, with some labels that do not count."""
    draw, found = torch.Generator().manual_seed(0), []
    for k in range(count):
        x = torch.randint(0, 50, (length - k % 3 if odd else length,), generator=draw)
        labels = x.clone()
        if odd:
            labels[: 1 + k % 4] = -100
        found.append({"input_ids": x, "labels": labels})
    return found


def padded(batch):
    longest = max(len(x["input_ids"]) for x in batch)

    def pad(name, value):
        return torch.stack([torch.nn.functional.pad(x[name], (0, longest - len(x[name])), value=value) for x in batch])

    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}


def options(folder, **more):
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "per_device_eval_batch_size": 4, "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
        "disable_tqdm": True, "weight_decay": 0.1, "warmup_steps": 2, **more,
    }  # fmt: skip


def losses(trainer):
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


def logged(trainer, *names):
    return [[x.get(name) for name in names] for x in trainer.state.log_history if "loss" in x]


def theirs(folder, more, **given):
    given = {"model": build(), "train_dataset": rows(), **given}
    trainer = transformers.Trainer(args=transformers.TrainingArguments(**options(folder, **more)), **given)
    trainer.train()
    return trainer


def ours(folder, more, **given):
    given = {"model": build(), "train_dataset": rows(), **given}
    trainer = Trainer(args=TrainingArguments(**options(folder, **more)), **given)
    trainer.train()
    return trainer
