"""Evaluation: models, outputs and buffers are what transformers' Trainer has."""

import copy

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.models.clip.modeling_clip import CLIPOutput

import zerofn
from tests.support.trainer_runs import MARKS, build, losses, options, rows
from zerofn.integrations import transformers as ours
from zerofn.integrations.transformers.evaluation import mapped, tensors_of

pytestmark = MARKS


def own_methods(kind):
    """As transformers' documentation has them."""

    class Mine(kind):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            logits = outputs.logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten())
            return (loss, outputs) if return_outputs else loss

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            assert isinstance(model, transformers.PreTrainedModel) and model.config.vocab_size == 50
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                outputs = model(inputs["input_ids"], labels=inputs["labels"], output_hidden_states=True)
                other = self.model(inputs["input_ids"])
                assert next(model.parameters()).shape == (50, 16)
            assert type(outputs) is CausalLMOutputWithPast and len(outputs.hidden_states) == 3
            return outputs.loss, (outputs.logits, other.logits), inputs["labels"]

    return Mine, {}


def loss_function(kind):
    def loss(outputs, labels, num_items_in_batch=None):
        kinds = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return kinds / (labels.numel() if num_items_in_batch is None else num_items_in_batch)

    return kind, {"compute_loss_func": loss}


@pytest.mark.part(case=[own_methods])
@pytest.mark.parametrize("case", [own_methods, loss_function])
def test_outputs_are_the_models_own(tmp_path, case):
    found = []
    for library in (transformers, ours):
        kind, given = case(library.Trainer)
        args = library.TrainingArguments(**options(tmp_path, max_steps=2))
        trainer = kind(model=build(), args=args, train_dataset=rows(), eval_dataset=rows(6), **given)
        trainer.train()
        predicted = trainer.predict(rows(6))
        found.append((losses(trainer), trainer.evaluate()["eval_loss"], predicted.predictions))
    for mine, plain in zip(*reversed(found), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


def evaluated_in(library, folder, dtype, **more):
    """Evaluate, and train afterwards."""
    seen = []

    def kept(logits, labels):
        seen.append(logits.dtype)
        return logits

    args = library.TrainingArguments(**options(folder, max_steps=2, **more))
    trainer = library.Trainer(build().to(dtype), args, train_dataset=rows(), eval_dataset=rows(6),
                              compute_metrics=lambda found: {"size": float(abs(found.predictions).mean())},
                              preprocess_logits_for_metrics=kept)  # fmt: skip
    found = trainer.evaluate()
    trainer.train()
    return found["eval_loss"], found["eval_size"], losses(trainer), seen[0]


@pytest.mark.whole
def test_a_model_that_is_evaluated_in_half_precision(tmp_path):
    """Cast for it, as `bf16_full_eval` says, or so from the begin."""
    for dtype, more in ((torch.float32, {"bf16_full_eval": True}), (torch.bfloat16, {})):
        mine, plain = (evaluated_in(library, tmp_path, dtype, **more) for library in (ours, transformers))
        np.testing.assert_allclose(mine[:2], plain[:2], rtol=1e-5)
        np.testing.assert_allclose(mine[2], plain[2], rtol=1e-3)  # transformers' model stays cast
        assert mine[3] == plain[3] == torch.bfloat16


def test_only_tensors_of_outputs_are_kept():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    given = CLIPOutput(loss=x.sum(), text_embeds=x, text_model_output=BaseModelOutput(last_hidden_state=x))
    found = tensors_of(given)
    assert type(found) is CLIPOutput and type(found.text_model_output) is BaseModelOutput
    assert found.text_embeds is found.text_model_output.last_hidden_state is x
    cached = CausalLMOutputWithPast(logits=x, past_key_values=transformers.DynamicCache(), attentions=(x, None))
    assert list(tensors_of(cached)) == ["logits", "attentions"] and len(tensors_of(cached).attentions) == 1
    assert type(tensors_of((x, [x], None))) is tuple and type(tensors_of({"a": x, "b": 3})) is dict
    names = mapped(lambda name, v: torch.tensor(len(name)), found)
    assert int(names.text_embeds) == len("text_embeds") and type(names.text_model_output) is BaseModelOutput


def test_empty_outputs_of_a_model_stay(tmp_path):
    """GPT-2 has cross attentions, of no layer."""
    given = {"vocab_size": 50, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "bos_token_id": 0}
    config = transformers.GPT2Config(**given, eos_token_id=0, output_attentions=True, attn_implementation="eager")
    found = []
    for library in (transformers, ours):
        torch.manual_seed(0)
        trainer = library.Trainer(transformers.GPT2LMHeadModel(config), library.TrainingArguments(**options(tmp_path)))
        found.append(trainer.predict(rows(4), ignore_keys=["past_key_values"]).predictions)
    assert [len(x) for x in found] == [3, 3] and found[0][2] == found[1][2] == ()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def resnet():
    torch.manual_seed(0)
    shape = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**shape))


def pictures(count=24):
    draw = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(3, 16, 16, generator=draw), "labels": k % 3} for k in range(count)]


def trained(library, folder, **more):
    given = {"gradient_accumulation_steps": 2, "max_steps": 6, "learning_rate": 1e-3, "save_strategy": "steps", **more}
    given |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    given |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the first is the best
    args = library.TrainingArguments(**options(folder, **given))
    trainer = library.Trainer(resnet(), args, train_dataset=pictures(), eval_dataset=pictures(6))
    trainer.train()
    return trainer


def evaluated(trainer):
    return [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]


def test_batch_norm_is_transformers(tmp_path):
    """Running statistics over microbatches, in evaluations, in the best model, and in what is saved."""
    plain, mine = (trained(library, tmp_path / library.__name__) for library in (transformers, ours))
    np.testing.assert_allclose(losses(mine), losses(plain), rtol=1e-6)
    np.testing.assert_allclose(evaluated(mine), evaluated(plain), rtol=1e-6)
    assert mine.state.best_global_step == plain.state.best_global_step == 2
    mine.save_model(str(tmp_path / "saved"))
    again = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "saved")
    for name, x in plain.model.state_dict().items():
        torch.testing.assert_close(mine.model.state_dict()[name], x, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(again.state_dict()[name], mine.model.state_dict()[name], rtol=0, atol=0)
    assert mine.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)


@pytest.mark.whole
def test_batch_norm_goes_on_from_a_checkpoint(tmp_path):
    whole = trained(ours, tmp_path)
    args = ours.TrainingArguments(**options(tmp_path / "again", gradient_accumulation_steps=2, max_steps=6,
                                            learning_rate=1e-3))  # fmt: skip
    again = ours.Trainer(resnet(), args, train_dataset=pictures(), eval_dataset=pictures(6))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(again)[4:] == losses(whole)[4:]
    assert again.evaluate()["eval_loss"] == evaluated(whole)[2]


@pytest.mark.whole
def test_batch_norm_in_half_precision(tmp_path):
    plain, mine = (trained(library, tmp_path / library.__name__, bf16=True) for library in (transformers, ours))
    np.testing.assert_allclose(losses(mine), losses(plain), rtol=0.02)
    np.testing.assert_allclose(evaluated(mine), evaluated(plain), rtol=0.02)


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.places = torch.nn.Linear(4, 3), None
        self.probabilities, self.calls, self.used, self.stats = [], 0, torch.zeros(3), {}

    def forward(self, x):
        if self.places is None:  # a cache, which is read and written
            self.places = torch.arange(3.0).cos()
        p = (self.layer(x) + self.places).softmax(-1)
        self.probabilities.append(p.detach())
        self.calls += 1
        self.used = 0.9 * self.used + 0.1 * p.detach().mean(0)
        self.stats["rows"] = self.stats.get("rows", 0) + len(x)
        self.balance = p.mean(0).square().sum()
        return p


class Routed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), Router())

    def forward(self, x, labels=None):
        p = self.layers(x)
        self.last, self.highest = p.detach(), p.max().item()
        return {"loss": torch.nn.functional.cross_entropy(p, labels), "logits": p}


def kept(library, folder, parts):
    """Return what a callback finds of a model after every step and evaluation, and the losses."""
    found = []

    class Looks(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            router = model.layers[1]
            assert type(router) is Router and not model.last.requires_grad
            found.append(
                [model.last, model.highest, router.calls, router.stats, router.used, len(router.probabilities)]
            )
            found[-1] = copy.deepcopy([*found[-1], router.probabilities[-1], router.balance.detach()])

        on_evaluate = on_step_end

    class Balances(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs["loss"] + 0.1 * model.layers[1].balance
            return (loss, outputs) if return_outputs else loss

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(4, generator=draw), "labels": k % 3} for k in range(24)]
    args = options(folder, max_steps=3, gradient_accumulation_steps=parts, eval_strategy="steps", eval_steps=2)
    trainer = Balances(Routed(), library.TrainingArguments(**args), train_dataset=data, eval_dataset=data[:8],
                       callbacks=[Looks()])  # fmt: skip
    trainer.train()
    return found, losses(trainer)


@pytest.mark.part(parts=[2])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_a_models_parts_keep_is_there_between_steps(tmp_path, parts, caplog):
    caplog.set_level("INFO", "zerofn")
    mine, plain = (kept(library, tmp_path, parts) for library in (ours, transformers))
    assert len(mine[0]) == 5
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
    captures = [x for x in caplog.messages if x.startswith("train_step: captured ")]
    assert len(captures) == 2 and "places" in captures[1], "the cache is a constant of the second one"


class Queue(torch.nn.Module):
    """A memory bank that is written in turns, at a number that the module counts."""

    def __init__(self):
        super().__init__()
        self.layer, self.at = torch.nn.Linear(4, 3), 0
        self.register_buffer("bank", torch.zeros(6, 3))

    def forward(self, x, labels=None):
        logits = self.layer(x) + self.bank.mean(0)
        if self.training:
            self.bank[self.at : self.at + 2] = logits[:2].detach()
            self.bank.mul_(1 + 0.01 * self.at)
            self.at = (self.at + 2) % 6
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Kept(Queue):
    """The same in a plain attribute."""

    def __init__(self):
        super().__init__()
        del self.bank
        self.bank = torch.zeros(6, 3)

    def forward(self, x, labels=None):
        found = super().forward(x, labels)
        self.bank = self.bank.clone()
        return found


def queued(library, folder, parts=1, model=Queue):
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(4, generator=draw), "labels": k % 3} for k in range(24)]
    args = library.TrainingArguments(**options(folder, max_steps=5, gradient_accumulation_steps=parts))
    trainer = library.Trainer(model(), args, train_dataset=data)
    trainer.train()
    return losses(trainer), trainer.model.bank, trainer.model.at


def test_a_buffer_is_written_where_a_number_of_the_modules_says(tmp_path):
    torch.testing.assert_close(*(queued(library, tmp_path) for library in (ours, transformers)), rtol=1e-6, atol=1e-6)


def test_a_number_that_microbatches_read_and_change_is_a_sentence(tmp_path):
    with pytest.raises(
        zerofn.CaptureError, match="reads self.model.at and changes it. The method is captured once for the 2"
    ):
        queued(ours, tmp_path, parts=2)


def test_a_tensor_in_an_attribute_that_is_written_in_place_is_a_sentence(tmp_path):
    with pytest.raises(
        zerofn.CaptureError, match="writes in place into a tensor that is stored in an attribute. Make it a buffer"
    ):
        queued(ours, tmp_path, model=Kept)
