"""transformers' Trainer with ZeroFn's step, beside transformers' own on one process."""

import json

import numpy as np
import pytest
import torch
import transformers

import zerofn
import zerofn.integrations.transformers
from tests.support.same import assert_same_trees
from tests.support.small_steps import captures_of
from tests.support.trainer_runs import (
    MARKS,
    STEPS,
    build,
    logged,
    losses,
    options,
    ours,
    padded,
    rows,
    t5_config,
    theirs,
)
from zerofn.integrations.modules import call_with
from zerofn.integrations.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from zerofn.integrations.transformers.steps import Microbatch, stack

pytestmark = MARKS


CASES = {
    "plain": {},
    "stage 0": {"stage": 0},
    "cosine, no clipping": {"lr_scheduler_type": "cosine", "max_grad_norm": 0.0},
    "clipped": {"max_grad_norm": 0.3},
    "sgd": {"optim": "sgd", "learning_rate": 0.5},
    "rmsprop": {"optim": "rmsprop"},
    "adafactor": {"optim": "adafactor"},
    "accumulating": {"gradient_accumulation_steps": 3},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "epochs, whose last update is smaller": {
        "gradient_accumulation_steps": 5, "max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 5,
    },
}  # fmt: skip


@pytest.mark.part(name=["clipped", "epochs, whose last update is smaller"])
@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_transformers(tmp_path, name, caplog):
    caplog.set_level("INFO", "zerofn")
    more = CASES[name]
    plain = theirs(tmp_path, {k: v for k, v in more.items() if k != "stage"})
    mine = ours(tmp_path, more)
    captures = [x for x in caplog.messages if x.startswith("train_step: captured ")]
    assert len(captures) == (2 if name.startswith("epochs") else 1), captures
    assert len(losses(mine)) == len(losses(plain)) >= 4
    names = ("loss", "learning_rate", "epoch")
    np.testing.assert_allclose(logged(mine, *names), logged(plain, *names), rtol=1e-6)
    np.testing.assert_allclose(logged(mine, "grad_norm"), logged(plain, "grad_norm"), rtol=2e-5)


@pytest.mark.part(steps=[3])
@pytest.mark.parametrize("steps", [1, 3])
def test_microbatches_of_other_lengths(tmp_path, steps):
    """Each has its share of the tokens that count."""
    given = {"train_dataset": rows(60, odd=True), "data_collator": padded}
    more = {"gradient_accumulation_steps": steps, "max_steps": 3}
    np.testing.assert_allclose(
        losses(ours(tmp_path, more, **given)), losses(theirs(tmp_path, more, **given)), rtol=1e-6
    )


@pytest.mark.part(initialised=[True])
@pytest.mark.parametrize("initialised", [True, False])
def test_dropout_is_off_in_evaluations_and_on_behind_them(tmp_path, initialised):
    def dropping():
        torch.manual_seed(3)
        given = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "bos_token_id": None, "eos_token_id": None}
        small = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32, **given)
        return transformers.AutoModelForCausalLM.from_config(small)

    def run(name):
        given = {"model_init": dropping, "model": None} if initialised else {"model": dropping()}
        return ours(tmp_path / name, {"eval_strategy": name, "eval_steps": 2}, eval_dataset=rows(4), **given)

    runs = [run("no"), run("steps")]
    assert losses(runs[0]) == losses(runs[1])
    runs[0].save_model(str(tmp_path / "saved"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    args = transformers.TrainingArguments(**options(tmp_path / "plain"))
    expected = transformers.Trainer(plain, args, eval_dataset=rows(4)).evaluate()["eval_loss"]
    assert runs[0].evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_evaluation_and_the_best_model(tmp_path):
    more = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
        "learning_rate": 0.05, "save_total_limit": 2,
    }  # fmt: skip

    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    given = {"eval_dataset": rows(10), "compute_metrics": accuracy}
    plain, mine = theirs(tmp_path / "a", more, **given), ours(tmp_path / "b", more, **given)
    found = [
        [(x["eval_loss"], x["eval_accuracy"]) for x in t.state.log_history if "eval_loss" in x] for t in (plain, mine)
    ]
    assert len(found[0]) == 3
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    assert mine.state.best_global_step == plain.state.best_global_step < 6  # the largest loss is the first
    assert mine.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)
    logits = [t.predict(rows(6)).predictions for t in (plain, mine)]
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-3, atol=1e-4)


def train_on_ranks(folder, more, resume=None):
    """On every rank; the losses, and on rank 0 the parameters."""
    args = TrainingArguments(**options(folder, **more))
    trainer = Trainer(model_init=build, args=args, train_dataset=rows())
    assert all(p.is_meta for p in trainer.model.parameters())
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/last")
    return losses(trainer), zerofn.unshard(trainer.sharded.params)


@pytest.mark.whole
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_are_one_with_twice_the_rows(ranks, tmp_path, stage):
    more = {"stage": stage, "per_device_train_batch_size": 2}
    mine, params = ranks(2, train_on_ranks, tmp_path, more, group=False)[0]
    plain = theirs(tmp_path, {})
    np.testing.assert_allclose(mine, losses(plain), rtol=1e-6)
    for name, x in plain.model.named_parameters():
        torch.testing.assert_close(params[name], x.detach(), rtol=1e-4, atol=1e-5)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    assert_same_trees(dict(again.named_parameters()), params)


@pytest.mark.whole
def test_a_run_goes_on_with_other_ranks(ranks, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "save_total_limit": None}
    whole = ours(tmp_path / "whole", {"max_steps": 6})
    ours(tmp_path / "run", {**saving, "max_steps": 6})
    one = Trainer(args=TrainingArguments(**options(tmp_path / "run", **saving)), model=build(), train_dataset=rows())
    one.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    np.testing.assert_allclose(losses(one), losses(whole), rtol=1e-6)
    assert_same_trees(zerofn.unshard(one.sharded.params), zerofn.unshard(whole.sharded.params))
    more = {**saving, "per_device_train_batch_size": 2, "stage": 2}
    saved = str(tmp_path / "run" / "checkpoint-4")
    mine, _ = ranks(2, train_on_ranks, tmp_path / "run", more, saved, group=False)[0]
    np.testing.assert_allclose(mine, losses(whole), rtol=1e-6)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-4")
    assert again.config.architectures == ["LlamaForCausalLM"]


def test_translations_are_generated(tmp_path):
    t5 = t5_config(40)
    draw = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": torch.randint(2, 40, (7,), generator=draw), "labels": torch.randint(2, 40, (5,), generator=draw)}
        for _ in range(16)
    ]

    def seq2seq(kind, arguments, **more):
        torch.manual_seed(1)
        given = options(tmp_path, predict_with_generate=True, generation_max_length=6, **more)
        trainer = kind(
            model=transformers.T5ForConditionalGeneration(t5), args=arguments(**given), train_dataset=data,
            eval_dataset=data[:8], data_collator=transformers.default_data_collator,
        )  # fmt: skip
        trainer.train()
        return trainer

    plain = seq2seq(transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments)
    mine = seq2seq(Seq2SeqTrainer, Seq2SeqTrainingArguments, stage=2)
    np.testing.assert_allclose(losses(mine), losses(plain), rtol=1e-5)
    assert mine.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    np.testing.assert_array_equal(*(t.predict(data[:8]).predictions for t in (plain, mine)))


def test_callbacks_see_the_run_and_stop_it(tmp_path):
    class Stops(transformers.TrainerCallback):
        seen = []

        def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
            self.seen.append((state.global_step, optimizer.param_groups[0]["lr"], type(model).__name__))
            control.should_training_stop = state.global_step == 3

    ours(tmp_path, {}, callbacks=[Stops()])
    assert [x[0] for x in Stops.seen] == [1, 2, 3] and {x[2] for x in Stops.seen} == {"LlamaForCausalLM"}


def in_half(library, folder, precision):
    """Train with a loss that takes outputs, parameters and a part of the model outside of the model's own call."""
    dtypes = set()

    class Mine(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["input_ids"], labels=inputs["labels"], output_hidden_states=True)
            again = self.model.lm_head(outputs.hidden_states[-1])
            dtypes.update({outputs.logits.dtype, again.dtype, outputs.hidden_states[0].dtype})
            decay = sum(p.square().sum() for p in model.parameters())
            near = torch.nn.functional.cross_entropy(again.mean(1) @ outputs.logits.mean(1).T, torch.arange(len(again)))
            loss = outputs.loss + 0.1 * near + 1e-3 * decay
            return (loss, outputs) if return_outputs else loss

    def metrics(found):
        dtypes.add(found.predictions[0].dtype)
        return {"size": float(np.abs(found.predictions[0]).mean())}

    given = {"max_steps": 6, "weight_decay": 0.0, "train_sampling_strategy": "sequential", precision: True}
    args = library.TrainingArguments(**options(folder, **given))
    trainer = Mine(build(), args, train_dataset=rows(), eval_dataset=rows(6), compute_metrics=metrics)
    trainer.train()
    found = trainer.evaluate()
    norms = [x["grad_norm"] for x in trainer.state.log_history if "grad_norm" in x]
    return trainer, (losses(trainer), norms, found["eval_loss"], found["eval_size"]), dtypes


@pytest.mark.whole  # test_float16_is_autocast_with_a_gradient_scaler has half precision
def test_bfloat16_is_transformers(tmp_path):
    """But for what is rounded elsewhere: sums of layers and weights of norms have half precision here."""
    (_, mine, ours_in), (_, plain, theirs_in) = (
        in_half(library, tmp_path, "bf16") for library in (zerofn.integrations.transformers, transformers)
    )
    for found, expected, tolerance in zip(mine, plain, (5e-4, 5e-3, 5e-4, 5e-3), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance)
    assert ours_in == theirs_in == {torch.float32, np.dtype("float32")}


def test_float16_is_autocast_with_a_gradient_scaler(tmp_path):
    """transformers has it on no CPU."""
    trainer, (found, norms, *_), _ = in_half(zerofn.integrations.transformers, tmp_path, "fp16")
    model, scaler = build(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    rates = [x["learning_rate"] for x in trainer.state.log_history if "loss" in x]
    for k, (rate, batch) in enumerate(zip(rates, trainer.get_train_dataloader(), strict=False)):
        optimizer.param_groups[0]["lr"] = rate
        with torch.autocast("cpu", torch.float16):
            outputs = model(batch["input_ids"], labels=batch["labels"], output_hidden_states=True)
        logits = outputs.logits.float()
        again = model.lm_head(outputs.hidden_states[-1].float())
        near = torch.nn.functional.cross_entropy(again.mean(1) @ logits.mean(1).T, torch.arange(len(again)))
        loss = outputs.loss + 0.1 * near + 1e-3 * sum(p.square().sum() for p in model.parameters())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert found[k] == pytest.approx(loss.item(), rel=5e-4) and norms[k] == pytest.approx(norm.item(), rel=5e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert float(trainer.sharded.loss_scale.loss_scale) == scaler.get_scale()


@pytest.mark.whole
def test_in_half_precision_losses_are_float32(tmp_path):
    """T5 gives its own loss bfloat16 logits; GPT-2 and Llama make them float32 first."""
    t5 = t5_config(50)
    data = [{**x, "attention_mask": torch.ones_like(x["input_ids"])} for x in rows(16)]
    given = {"train_dataset": data, "eval_dataset": data[:4]}
    mine = ours(tmp_path, {"bf16": True}, model=transformers.T5ForConditionalGeneration(t5), **given)
    found = torch.tensor([*losses(mine), mine.evaluate()["eval_loss"]])
    assert not torch.equal(found, found.bfloat16().float())


class Shaken(torch.nn.Module):
    """The mean of the noise that NEFTune adds to embeddings, and of what is added to it."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        torch.nn.init.zeros_(self.embed.weight)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, labels):
        found = self.embed(input_ids)
        return {"loss": found.abs().mean() + self.embed.weight.sum(), "logits": found}


def test_neftune_shakes_embeddings_while_they_are_trained(tmp_path):
    mine = ours(tmp_path, {"neftune_noise_alpha": 5.0, "learning_rate": 0.0}, model=Shaken(), eval_dataset=rows(4))
    expected = 5.0 / (8 * 16) ** 0.5 / 2  # of a uniform distribution
    assert len(set(losses(mine))) == STEPS and losses(mine) == pytest.approx([expected] * STEPS, rel=0.15)
    assert mine.evaluate()["eval_loss"] == 0.0


def test_skipped_updates_are_in_the_logs(tmp_path):
    data = [{"input_ids": x["input_ids"], "labels": x["labels"].float()} for x in rows(20)]
    data[5]["labels"][0] = float("nan")

    class Mine(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            found = model(inputs["input_ids"]).logits.mean(-1)
            return torch.nn.functional.mse_loss(found, inputs["labels"])

    args = TrainingArguments(**options(tmp_path, max_steps=4, train_sampling_strategy="sequential"))
    trainer = Mine(build(), args, train_dataset=data)
    trainer.train()
    assert [x.get("skipped_updates") for x in trainer.state.log_history] == [None, 1, 1, 1, None]


def masked(where):
    """Return a collator that pads on that side, with a mask and a weight for each token."""

    def collate(batch):
        longest = max(len(x["input_ids"]) for x in batch)

        def pad(x, value):
            more = longest - len(x)
            return torch.nn.functional.pad(x, (more, 0) if where == "left" else (0, more), value=value)

        found = {
            name: torch.stack([pad(x[name], v) for x in batch]) for name, v in (("input_ids", 0), ("labels", -100))
        }
        found["attention_mask"] = torch.stack([pad(torch.ones_like(x["input_ids"]), 0) for x in batch])
        return found | {"w": found["attention_mask"] * found["input_ids"].sin().abs()}

    return collate


def looking(library, folder, case, **more):
    """Train with a loss that looks at what other losses mask, or with weights for each token."""
    where = case.split()[0]

    class Looking(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            w, labels = inputs.pop("w"), inputs["labels"]
            out = model(**inputs)
            loss = out.loss + out.logits[:, -1].square().mean() + out.logits.mean(1).square().mean()
            if "weights" in case:
                each = torch.nn.functional.cross_entropy(
                    out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
                )
                loss = (each * w[:, 1:].flatten()).sum() / w.sum()
            return (loss, out) if return_outputs else loss

    more = {"max_steps": 3, "remove_unused_columns": False, **more}
    trainer = Looking(
        build(), library.TrainingArguments(**options(folder, **more)),
        train_dataset=rows(48, odd=True), eval_dataset=rows(6, odd=True), data_collator=masked(where),
    )  # fmt: skip
    trainer.train()
    return [*losses(trainer), trainer.evaluate()["eval_loss"]]


@pytest.mark.part(case=["right, weights"])
@pytest.mark.parametrize(
    "case, more",
    [pytest.param("left", {}, marks=pytest.mark.whole), ("left", {"gradient_accumulation_steps": 2}),
     ("right", {"pad_to_multiple_of": 1}), pytest.param("right, weights", {}, marks=pytest.mark.whole),
     ("right, weights", {"gradient_accumulation_steps": 2, "pad_to_multiple_of": 3})],
)  # fmt: skip
def test_a_loss_that_looks_at_padding_or_has_weights_for_tokens(tmp_path, case, more):
    plain = {k: v for k, v in more.items() if k != "pad_to_multiple_of"}
    mine = looking(zerofn.integrations.transformers, tmp_path, case, **more)
    np.testing.assert_allclose(mine, looking(transformers, tmp_path, case, **plain), rtol=1e-6)


def classify(library, folder):
    """Train a classifier of several labels a row, on rows of several lengths."""
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    kind = {"num_labels": 5, "problem_type": "multi_label_classification"}
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=50, **shape, **dropout, **kind)
    )

    def collate(batch):
        found = masked("right")(batch)
        del found["w"]
        return found | {"labels": torch.stack([x["input_ids"][:5] % 2 for x in batch]).float()}

    args = library.TrainingArguments(**options(folder, max_steps=3, per_device_train_batch_size=1))
    trainer = library.Trainer(model, args, train_dataset=rows(12, odd=True), data_collator=collate)
    trainer.train()
    return losses(trainer)


def test_labels_of_one_width_keep_it(tmp_path):
    mine = classify(zerofn.integrations.transformers, tmp_path)
    np.testing.assert_allclose(mine, classify(transformers, tmp_path), rtol=1e-6)


def ragged_on_ranks(folder, rank_rows, steps):
    args = TrainingArguments(**options(folder, per_device_train_batch_size=rank_rows, max_steps=steps, stage=3,
                                       per_device_eval_batch_size=rank_rows, save_strategy="steps",
                                       save_steps=2))  # fmt: skip
    data = rows(48, odd=True)
    trainer = Trainer(build(), args, train_dataset=data, eval_dataset=data[:8], data_collator=padded)
    trainer.add_callback(SavesAlone(trainer))
    trainer.train()
    assert len(captures_of(trainer._step)) <= 2  # of two lengths: neither saves nor what they write to the config count
    found = trainer.predict(data[:8])
    return losses(trainer), found.metrics["test_loss"], found.predictions


class SavesAlone(transformers.TrainerCallback):
    """What rank 0 saves is written into the model's config, on that rank."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            with self.trainer.whole_model():
                if self.trainer.is_world_process_zero():
                    self.trainer.model.save_pretrained(f"{args.output_dir}/alone")


class OwnRate(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if zerofn.rank() == 1:
            optimizer.param_groups[0]["lr"] = 0.5


def on_ranks(folder):
    found = ragged_on_ranks(folder, 2, 3)
    trainer = Trainer(build(), TrainingArguments(**options(folder)), train_dataset=rows(), callbacks=[OwnRate()])
    with pytest.raises(ValueError, match=r"differ between rank 1 and rank 0. Rank \d has the learning rates"):
        trainer.train()
    return found


def looking_on_ranks(folder, case, own):
    more = {"per_device_train_batch_size": 2, "logging_steps": 3}
    plain = looking(transformers, folder, case, **more)  # under DDP
    mine = looking(zerofn.integrations.transformers, folder, case, **more, **own)
    np.testing.assert_allclose(mine, plain, rtol=1e-6)


@pytest.mark.whole  # test_ranks_whose_rows_differ_in_length_or_rates
@pytest.mark.part(case=["left"])
@pytest.mark.parametrize(("case", "own"), [("left", {}), ("right", {"pad_to_multiple_of": 1})])
def test_ranks_whose_padding_counts_train_as_under_ddp(ranks, tmp_path, case, own):
    ranks(2, looking_on_ranks, tmp_path, case, own, group=False)


def test_ranks_whose_rows_differ_in_length_or_rates(ranks, tmp_path):
    """Rows are padded where that is neutral; a rank's own rates are an error."""
    given = {"train_dataset": rows(48, odd=True), "data_collator": padded}
    mine, loss, logits = ranks(2, on_ranks, tmp_path, group=False)[0]
    np.testing.assert_allclose(mine, losses(theirs(tmp_path, {"max_steps": 3}, **given)), rtol=1e-6)
    alone = ragged_on_ranks(tmp_path, 2, 3)
    assert logits.shape == alone[2].shape and np.isfinite(loss)


DEEPSPEED = {
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
}


def test_a_deepspeed_configuration(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    mine = ours(tmp_path, {"deepspeed": str(tmp_path / "ds.json"), "gradient_accumulation_steps": 2})
    assert mine.sharded.params.spec.stage == 2
    plain = theirs(tmp_path, {"gradient_accumulation_steps": 2})
    np.testing.assert_allclose(losses(mine), losses(plain), rtol=1e-6)
    bare = {"type": "AdamW", "params": {"lr": "auto"}}  # the rest is DeepSpeed's own
    args = TrainingArguments(**options(tmp_path, deepspeed={**DEEPSPEED, "optimizer": bare}, adam_beta2=0.9))
    assert (args.learning_rate, args.weight_decay, args.adam_beta2) == (1e-2, 0.0, 0.999)
    with pytest.raises(ValueError, match=r"has gradient_clipping=0.5, but the arguments have 1.0"):
        TrainingArguments(**options(tmp_path, deepspeed={**DEEPSPEED, "gradient_clipping": 0.5}))
    with pytest.raises(ValueError, match="has stage 2, but the arguments have stage=1"):
        TrainingArguments(**options(tmp_path, deepspeed=DEEPSPEED, stage=1))
    other = {**DEEPSPEED, "scheduler": {"type": "Warmup", "params": {}}}
    with pytest.raises(ValueError, match="WarmupLR"):
        TrainingArguments(**options(tmp_path, deepspeed=other))
    with pytest.raises(ValueError, match="both choose how to shard"):
        TrainingArguments(**options(tmp_path, deepspeed=DEEPSPEED, fsdp=True))


@pytest.mark.part(kind=["WarmupDecayLR"])
@pytest.mark.parametrize(
    "kind, expected",
    [
        ("WarmupLR", zerofn.optim.warmup_lr(0.0, 1e-2, 3)),
        ("WarmupDecayLR", zerofn.optim.warmup_decay_lr(STEPS, 0.0, 1e-2, 3)),
    ],
)
def test_a_scheduler_of_deepspeeds(tmp_path, kind, expected):
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 3}
    if kind == "WarmupDecayLR":
        params["total_num_steps"] = "auto"
    config = {**DEEPSPEED, "scheduler": {"type": kind, "params": params}}
    mine = ours(tmp_path, {"deepspeed": config, "warmup_steps": 0})
    rates = [float(expected(k)) for k in range(STEPS)]
    shown = [x["learning_rate"] for x in mine.state.log_history if "loss" in x]
    np.testing.assert_allclose(shown, rates, rtol=1e-6)


@pytest.mark.whole  # Lightning's is in make test
def test_a_state_on_drives_trains_and_evaluates(tmp_path):
    given = {"eval_dataset": rows(6)}
    there, here = (ours(tmp_path, more, **given) for more in ({"offload": "nvme"}, {}))
    assert losses(there) == losses(here) and there.evaluate()["eval_loss"] == here.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    "given, stage, remat",
    [
        ({"fsdp": True}, 3, None),
        ({"fsdp": "shard_grad_op auto_wrap"}, 2, None),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "activation_checkpointing": True}}, 2, "full"),
        ({"gradient_checkpointing": True, "stage": 1}, 1, "full"),
    ],
)
def test_transformers_own_words_choose_the_stage_and_recomputation(tmp_path, given, stage, remat):
    args = TrainingArguments(**options(tmp_path, **given))
    assert args.shard_options["stage"] == stage and args.compile_options.get("remat") == remat


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"torch_compile": True}, "torch_compile has no effect"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size has no effect"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be a positive integer, got 0"),
        ({"pad_to_multiple_of": 1.5}, "pad_to_multiple_of must be a positive integer, got 1.5"),
    ],
)
def test_what_has_no_counterpart_is_a_sentence(tmp_path, given, sentence):
    with pytest.raises(ValueError, match=sentence):
        ours(tmp_path, given, eval_dataset=rows(4))


def test_mistakes_of_trainer_are_sentences(tmp_path):
    with pytest.raises(TypeError, match="Import TrainingArguments from zerofn"):
        Trainer(build(), transformers.TrainingArguments(**options(tmp_path)))
    with pytest.raises(ValueError, match="Import Trainer from zerofn"):
        transformers.Trainer(build(), TrainingArguments(**options(tmp_path)))
    with pytest.raises(ValueError, match="Pass model_init"):
        Trainer(zerofn.skeleton(build), TrainingArguments(**options(tmp_path)), train_dataset=rows())
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match="has no folder 'zerofn'"):
        trainer = Trainer(build(), TrainingArguments(**options(tmp_path)), train_dataset=rows())
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_microbatches_are_stacked_where_they_can_be():
    def micro(k, width=3, items=True, kind=(1, 2)):
        inputs = {"x": torch.full((2, width), float(k)), "y": torch.zeros(2)}
        return Microbatch(inputs, torch.tensor([k + 5]) if items else None, torch.tensor([1.0 / (k + 1)]), kind)

    ((inputs, items, weights),), stacked = stack([micro(0), micro(1)])
    assert stacked == 2 and inputs["x"].shape == (4, 3) and items.tolist() == [5, 6] and weights.tolist() == [1.0, 0.5]
    assert stack([micro(0)])[1] == 1
    parts, stacked = stack([micro(0), micro(1, width=4)])
    assert stacked == 1 and len(parts) == 2 and parts[1][1].tolist() == [6]
    assert stack([micro(0), micro(1, items=False)])[1] == 1
    assert stack([micro(0), micro(1, kind=(1, 3))])[1] == 1, "on another rank they have other shapes"


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, given):
        self.given = given

    def __iter__(self):
        return iter(self.given)


def of_means(kind):
    """A trainer whose model takes no number of items: means of microbatches are averaged."""

    class Means(kind):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    return Means


def short_groups(folder, case, rank_rows=4):
    """On every rank: (loss, norm) of each update of both trainers. An epoch has 5 microbatches, an update 3."""
    more = {"max_steps": 4, "optim": "sgd", "gradient_accumulation_steps": 3, "max_grad_norm": 1e9}
    more |= {"per_device_train_batch_size": rank_rows, "average_tokens_across_devices": case != "tokens of a rank"}
    given = options(folder, **more)
    data, found = [{name: x[:6] for name, x in row.items()} for row in rows(20, odd=True)], []
    for kind, arguments in ((transformers.Trainer, transformers.TrainingArguments), (Trainer, TrainingArguments)):
        made = (of_means(kind) if case == "means" else kind)(build(), arguments(**given), train_dataset=Stream(data))
        made.train()
        found.append(logged(made, "loss", "grad_norm"))
    return found


@pytest.mark.whole
@pytest.mark.part(case=["tokens"])
@pytest.mark.parametrize("case", ["tokens", "means"])
def test_a_short_last_group_of_a_stream_is_added_to_the_next_epochs_first(tmp_path, case):
    plain, mine = short_groups(tmp_path, case)
    assert plain[1][0] > 1.5 * plain[0][0], "of 5 microbatches: the sum of two groups' losses"
    np.testing.assert_allclose(mine, plain, rtol=1e-5)


def short_groups_on_ranks(folder):
    return [short_groups(folder, case, 2) for case in ("tokens", "tokens of a rank")]


@pytest.mark.whole
def test_short_groups_on_two_ranks(ranks, tmp_path):
    for plain, mine in ranks(2, short_groups_on_ranks, tmp_path, group=False)[0]:
        assert plain[1][0] > 1.5 * plain[0][0]
        np.testing.assert_allclose(mine, plain, rtol=1e-5)


class Repeated(torch.nn.Module):
    """Its layers are one module under several names, and its first and last weight are one."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.BatchNorm1d(4)
        self.layers = torch.nn.ModuleList([layer, torch.nn.Linear(4, 4), layer])
        self.last = torch.nn.Linear(4, 4, bias=False)
        self.last.weight = self.layers[1].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def test_a_module_under_several_names_gets_values_and_its_own_back():
    torch.manual_seed(0)
    given, lent = Repeated(), Repeated()
    values = {name: x.detach().clone() for name, x in (*given.named_parameters(), *given.named_buffers())}
    before = {name: id(x) for name, x in lent.state_dict(keep_vars=True).items()}
    x = torch.randn(3, 4)
    torch.testing.assert_close(call_with(lent, values, (x,)), given(x))
    torch.testing.assert_close(values["layers.0.running_mean"], given.layers[0].running_mean)  # moved, as its own
    assert {name: id(x) for name, x in lent.state_dict(keep_vars=True).items()} == before


@pytest.mark.part(how=["a property"])
@pytest.mark.parametrize("how", ["a property", "a function"])
def test_what_a_callback_sets_on_the_trainer_is_followed(tmp_path, how):
    def weight(trainer):
        return trainer._weight

    class Sets(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            self.trainer._weight = 1.0 + state.global_step

    def found(kind, arguments):
        class Weighted(kind):
            factor = property(lambda self: self._weight)

            def compute_loss(self, *args, **kwargs):
                loss = super().compute_loss(*args, **kwargs)
                return loss * (self.factor if how == "a property" else weight(self))

        callback = Sets()
        args = arguments(**options(tmp_path, max_steps=3))
        callback.trainer = trainer = Weighted(build(), args, train_dataset=rows(), callbacks=[callback])
        trainer.train()
        return losses(trainer)

    np.testing.assert_allclose(
        found(Trainer, TrainingArguments), found(transformers.Trainer, transformers.TrainingArguments), rtol=1e-6
    )


def test_a_step_follows_the_loops_state_where_the_loss_reads_it_and_only_there(tmp_path, caplog):
    caplog.set_level("INFO", "zerofn")
    more = {"max_steps": 3, "lr_scheduler_type": "constant", "warmup_steps": 0}

    def weight(trainer):
        return 1.0 + trainer.state.global_step

    def found(kind, arguments):
        class Weighted(kind):
            def compute_loss(self, *args, **kwargs):
                return super().compute_loss(*args, **kwargs) * weight(self)

        class Evaluates(kind):
            def evaluate(self, *args, **kwargs):
                return {"eval_step": self.state.global_step}

        return [trained(x, arguments(**options(tmp_path, **more))) for x in (Weighted, Evaluates)]

    def trained(kind, args):
        caplog.clear()
        trainer = kind(build(), args, train_dataset=rows())
        trainer.train()
        return losses(trainer)

    mine = found(Trainer, TrainingArguments)
    assert sum("train_step: captured " in x for x in caplog.messages) == 1  # Evaluates's
    np.testing.assert_allclose(mine, found(transformers.Trainer, transformers.TrainingArguments), rtol=1e-6)
