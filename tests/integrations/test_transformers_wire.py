"""`TrainingArguments(wire=)`: in which form the ranks of a Trainer send parameters and gradients."""

import pytest
import torch
import transformers

import zerofn
from tests.support.same import assert_same_trees
from tests.support.trainer_runs import MARKS, build, losses, options, rows
from zerofn.integrations.transformers import Trainer, TrainingArguments

pytestmark = MARKS
FED_BACK = "gather=int8,reduce=int4,block=128,smallest=0,feedback=true"


@pytest.mark.parametrize(
    ("text", "wire"),
    [
        ("int8", zerofn.Wire("int8", "int8")),
        (FED_BACK, zerofn.Wire("int8", "int4", block=128, smallest=0, feedback=True)),
        ("reduce=fp8, rounding=stochastic", zerofn.Wire(reduce="fp8", rounding="stochastic")),
    ],
)
def test_words_are_a_wire(tmp_path, text, wire):
    (args,) = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "--wire", text]
    )
    assert args.shard_options["wire"] == wire and args.to_dict()["wire"] == text
    assert "wire" not in TrainingArguments(**options(tmp_path)).shard_options


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"wire": "gathers=int8"}, "has 'gathers=int8'; expected one of gather, reduce, block, "),
        ({"wire": "gather=int3"}, "gather='int3' is not possible"),
        ({"wire": "reduce=int8,block=large"}, "block must be a whole number, got 'large'"),
        ({"wire": FED_BACK, "gradient_accumulation_steps": 2}, "its own gradient. Write wire='reduce="),
    ],
)
def test_what_is_no_wire_is_a_sentence(tmp_path, given, sentence):
    with pytest.raises(ValueError, match=sentence):
        TrainingArguments(**options(tmp_path, **given))


def trained(folder, more, resume=None):
    """(losses, the state) of a rank."""
    trainer = Trainer(model_init=build, args=TrainingArguments(**options(folder, **more)), train_dataset=rows())
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.sharded
    return losses(trainer), zerofn.unshard({"params": state.params, "feedback": state.feedback})


@pytest.mark.whole
def test_a_trainer_feeds_back_what_codes_leave_out_and_goes_on_with_it(ranks, tmp_path):
    more = {"wire": FED_BACK, "per_device_train_batch_size": 2, "max_steps": 4}
    saving = {**more, "save_strategy": "steps", "save_steps": 2}
    (found, state), _ = ranks(2, trained, tmp_path / "run", saving, group=False)
    again, resumed = ranks(2, trained, tmp_path / "run", more, str(tmp_path / "run" / "checkpoint-2"), group=False)[0]
    assert again[-2:] == found[-2:]
    assert_same_trees(resumed, state)
    assert any(x.abs().max() > 0 for x in zerofn.tree.leaves(state["feedback"]))
    plain, _ = ranks(2, trained, tmp_path / "plain", {**more, "wire": None}, group=False)[0]
    assert found != plain and torch.allclose(torch.tensor(found), torch.tensor(plain), rtol=0.05)
