"""A Trainer on a mesh: two ranks that share rows, or experts, beside transformers' own on one process."""

import numpy as np
import pytest
import torch
import transformers

from tests.support.trainer_runs import MARKS, losses, options, rows
from zerofn.integrations.transformers import Trainer, TrainingArguments
from zerofn.integrations.transformers.meshes import axes_of

pytestmark = MARKS

SHAPE = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SHAPE, num_key_value_heads=2, max_position_embeddings=32)
    return transformers.AutoModelForCausalLM.from_config(config)


def mixtral():
    torch.manual_seed(3)
    config = transformers.MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=4)
    return transformers.AutoModelForCausalLM.from_config(config)


def more(rank_rows):
    return {
        "max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": rank_rows,
        "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": rank_rows, "max_grad_norm": 0.5,
    }  # fmt: skip


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean()),
            "rows": len(prediction.predictions)}  # fmt: skip


def found(trainer):
    names = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_rows")
    return [[x[name] for x in trainer.state.log_history if name in x] for name in names]


def on_ranks(folder, build, axes, rank_rows, initialised):
    args = TrainingArguments(**options(folder, **more(rank_rows), mesh=axes))
    given = {"train_dataset": rows(), "eval_dataset": rows(8), "compute_metrics": accuracy}
    trainer = Trainer(args=args, **({"model_init": build} if initialised else {"model": build()}), **given)
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    try:
        made = generated(trainer.model)
    except ValueError as error:
        made = str(error)
    return found(trainer), losses(trainer), trainer.predict(rows(6)).predictions, made


def generated(model):
    with torch.no_grad():
        return model.generate(torch.arange(4)[None], max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()


@pytest.mark.whole
@pytest.mark.parametrize(
    "build, axes, rank_rows, initialised",
    [(llama, "data=-1,tensor=2", 4, False), (mixtral, "expert=2", 2, True), (llama, "pipe=2", 4, True)],
)
def test_ranks_of_a_mesh_are_one(ranks, tmp_path, build, axes, rank_rows, initialised):
    args = transformers.TrainingArguments(**options(tmp_path / "plain", **more(4)))
    given = {"train_dataset": rows(), "eval_dataset": rows(8), "compute_metrics": accuracy}
    plain = transformers.Trainer(build(), args, **given)
    plain.train()
    given = (tmp_path, build, axes, rank_rows, initialised)
    mine, _, predictions, made = ranks(2, on_ranks, *given, group=False)[0]
    for ours, theirs in zip(mine, found(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    np.testing.assert_allclose(predictions, plain.predict(rows(6)).predictions, rtol=1e-3, atol=1e-4)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, x in plain.model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], x, rtol=1e-3, atol=1e-4)
    if axes == "pipe=2":  # whose layers are gathered, one by one
        assert made == generated(plain.model)
    else:
        assert "only the compiled steps" in made


def test_what_is_no_mesh_is_a_sentence():
    assert axes_of(None) is None and axes_of("data=-1, tensor=2") == {"data": -1, "tensor": 2}
    with pytest.raises(ValueError, match="'tenser=2'; expected the size of an axis"):
        axes_of("tenser=2")
    with pytest.raises(ValueError, match="splits sequences over ranks"):
        axes_of("data=2,context=2")
