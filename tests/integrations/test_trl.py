"""TRL's trainers with ZeroFn's step, beside TRL's own on one process."""

import random

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.integrations.test_adapters import base
from tests.support.trainer_runs import MARKS
from zerofn.integrations.transformers import TrainingArguments
from zerofn.integrations.trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

pytestmark = MARKS

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} <eos>"
    "{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
)
SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>"]


def tokenizer():
    words = {word: k for k, word in enumerate([*SPECIAL, *(f"w{k}" for k in range(40))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **special)


def build():
    return base(width=16)


def lora():
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def words(draw, count):
    return " ".join(f"w{draw.randrange(40)}" for _ in range(count))


def rows(kind, count=24):
    """Rows of other lengths, as each kind of data set has them."""
    draw = random.Random(0)
    made = {
        "text": lambda k: {"text": words(draw, 6 + k % 5)},
        "completion": lambda k: {"prompt": words(draw, 3 + k % 3) + " ", "completion": words(draw, 4 + k % 4)},
        "chat": lambda k: {"messages": [{"role": "user", "content": words(draw, 3)},
                                        {"role": "assistant", "content": words(draw, 3 + k % 4)}]},
        "pairs": lambda k: {"prompt": words(draw, 3 + k % 3) + " ", "chosen": words(draw, 4 + k % 4),
                            "rejected": words(draw, 5 + k % 3)},
    }[kind]  # fmt: skip
    return datasets.Dataset.from_list([made(k) for k in range(count)])


def options(folder, **more):
    return {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "per_device_eval_batch_size": 4, "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
        "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False, **more,
    }  # fmt: skip


def run(trainer, config, folder, kind, *, adapted=False, evaluated=False, **more):
    """Train, and return what was logged."""
    given = {"peft_config": lora()} if adapted else {}
    if evaluated:
        given["eval_dataset"] = rows(kind, 6)
        more |= {"eval_strategy": "steps", "eval_steps": 2}
    if kind == "pairs" and not adapted:
        given["ref_model"] = build()
    made = trainer(
        model=build(), args=config(**options(folder, **more)), train_dataset=rows(kind), processing_class=tokenizer(),
        **given,
    )  # fmt: skip
    made.train()
    return logged(made)


def logged(trainer):
    """Return what was logged of each step and evaluation, without what the clock says."""
    clocks = ("runtime", "per_second", "flos")
    return [{k: v for k, v in x.items() if not any(c in k for c in clocks)} for x in trainer.state.log_history]


def assert_logged_alike(found, expected):
    assert [list(x) for x in found] == [list(x) for x in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            # rewards are differences of log-probabilities of some 30 each
            assert mine[name] == pytest.approx(value, rel=1e-5, abs=2e-6), (name, mine["step"])


SFT = {
    "adapters": {"kind": "text", "adapted": True, "evaluated": True},
    "all weights": {"kind": "text"},
    "accumulating": {"kind": "text", "gradient_accumulation_steps": 2},
    "packed": {"kind": "text", "packing": True, "max_length": 16},
    "without padding": {"kind": "text", "padding_free": True, "max_length": None, "gradient_accumulation_steps": 2},
    "of assistants": {"kind": "chat", "assistant_only_loss": True},
    "of completions": {"kind": "completion", "evaluated": True},
    "recomputing": {"kind": "text", "adapted": True, "gradient_checkpointing": True},
    "dft": {"kind": "completion", "loss_type": "dft"},
}


@pytest.mark.part(name=["adapters"])
@pytest.mark.parametrize("name", SFT)
def test_supervised_finetuning(tmp_path, name):
    given = dict(SFT[name])
    expected = run(trl.SFTTrainer, trl.SFTConfig, tmp_path, **given)
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= expected[0].keys()
    assert_logged_alike(run(SFTTrainer, SFTConfig, tmp_path, **given), expected)


DPO = {
    "adapters": {"adapted": True, "evaluated": True},
    "reference model": {"evaluated": True},
    "accumulating": {"gradient_accumulation_steps": 2},
    "precomputed": {"precompute_ref_log_probs": True},
    "several losses": {"loss_type": ["sigmoid", "ipo", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "weighted": {"use_weighting": True, "ld_alpha": 0.5},
    "reference that follows": {"sync_ref_model": True, "ref_model_sync_steps": 2},
}


@pytest.mark.parametrize("name", DPO)
@pytest.mark.whole
def test_preferences(tmp_path, name):
    given = {"kind": "pairs", **DPO[name]}
    expected = run(trl.DPOTrainer, trl.DPOConfig, tmp_path, **given)
    assert {"rewards/margins", "logps/chosen", "logits/rejected"} <= expected[0].keys()
    assert_logged_alike(run(DPOTrainer, DPOConfig, tmp_path, **given), expected)


def reward(folder, trainer, config, **given):
    torch.manual_seed(3)
    shape = {**build().config.to_dict(), "id2label": {0: "reward"}}
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**shape))
    pairs = rows("pairs").remove_columns("prompt")
    made = trainer(
        model=model, args=config(**options(folder, **given)), train_dataset=pairs, processing_class=tokenizer()
    )
    made.train()
    return logged(made)


@pytest.mark.whole
@pytest.mark.parametrize("given", [{}, {"gradient_accumulation_steps": 2, "center_rewards_coefficient": 0.01}])
def test_rewards(tmp_path, given):
    expected = reward(tmp_path, trl.RewardTrainer, trl.RewardConfig, **given)
    assert_logged_alike(reward(tmp_path, RewardTrainer, RewardConfig, **given), expected)


def test_trainers_that_generate_are_a_sentence():
    with pytest.raises(
        ImportError, match="has no GRPOTrainer: ZeroFn supports SFTTrainer.*generate text inside their steps"
    ):
        from zerofn.integrations.trl import GRPOTrainer  # noqa: F401


def on_ranks(folder):
    given = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    tuned = run(SFTTrainer, SFTConfig, folder, "text", adapted=True, **given)
    return tuned, run(DPOTrainer, DPOConfig, folder, "pairs", **given)


@pytest.mark.whole
def test_two_ranks_are_one_with_twice_the_rows(ranks, tmp_path):
    """What TRL averages over a batch's tokens is averaged over those of both ranks; DPO's loss is a mean over pairs."""
    tuned, preferred = ranks(2, on_ranks, tmp_path, group=False)[0]
    assert_logged_alike(tuned, run(trl.SFTTrainer, trl.SFTConfig, tmp_path, "text", adapted=True))
    assert_logged_alike(preferred, run(trl.DPOTrainer, trl.DPOConfig, tmp_path, "pairs"))


def test_arguments_of_another_class_are_refused(tmp_path):
    for trainer, kind, others in (
        (SFTTrainer, "SFTConfig", (trl.SFTConfig, TrainingArguments, DPOConfig)),
        (DPOTrainer, "DPOConfig", (trl.DPOConfig, SFTConfig)),
    ):
        for other in others:
            more = {} if other is not TrainingArguments else {"bf16": False}
            args = other(**{**options(tmp_path), **more})
            with pytest.raises(TypeError, match=f"Import {kind} from zerofn.integrations.trl"):
                trainer(model=build(), args=args, train_dataset=rows("text"), processing_class=tokenizer())


@pytest.mark.whole
def test_a_reference_model_learns_nothing(tmp_path):
    reference = build()
    before = {name: x.detach().clone() for name, x in reference.named_parameters()}
    args = DPOConfig(**options(tmp_path, max_steps=2))
    trainer = DPOTrainer(build(), reference, args, train_dataset=rows("pairs"), processing_class=tokenizer())
    trainer.train()
    for name, x in reference.named_parameters():
        np.testing.assert_array_equal(x.detach(), before[name])
