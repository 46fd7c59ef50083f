"""Which methods of transformers' trainers and callbacks are called under ZeroFn: tables, held to transformers' own."""

import inspect

import pytest
import torch
import transformers

import zerofn
from tests.support.trainer_runs import MARKS, build, options, rows, t5_config
from zerofn.integrations import transformers as ours

pytestmark = MARKS

AS_OFTEN, SCRIPT = "called as often", "called by scripts, as it is"
CAPTURED = "called where a step is captured, or runs op by op"
TABLE = {
    **dict.fromkeys(
        """add_callback call_model_init create_accelerator_and_postprocess create_optimizer create_scheduler evaluate
        evaluation_loop floating_point_ops get_decay_parameter_names get_optimizer_cls_and_kwargs
        get_batch_samples get_cp_size get_eval_dataloader get_sp_size get_test_dataloader get_total_train_batch_size
        get_train_dataloader is_local_process_zero is_world_process_zero log num_examples predict
        prediction_step remove_callback save_model set_initial_training_values store_flos train
        training_step""".split(),
        AS_OFTEN,
    ),
    **dict.fromkeys(
        """create_model_card create_optimizer_and_scheduler end get_learning_rates get_num_trainable_parameters
        get_optimizer_group hyperparameter_search init_hf_repo log_metrics metrics_format pop_callback push_to_hub
        save_metrics save_state""".split(),
        SCRIPT,
    ),
    "compute_loss": CAPTURED,
    "get_tp_size": CAPTURED,  # since 5.24 for the loss too
    "load_generation_config": "called by Seq2SeqTrainer alone, as often",
    "autocast_smart_context_manager": CAPTURED,
    "compute_loss_context_manager": CAPTURED,
}
PRIVATE = {  # the others are called as often
    "_has_mixed_mesh_grads": "no effect because there are no DTensors",
    "_issue_warnings_after_load": "no effect because values are read into shards",
    "_prepare_context_parallel_inputs": "no effect because a mesh cuts sequences",
}
REFUSED = {"_save", "_wrap_model"}  # in a subclass: save_model writes from shards, and there is no wrapper


def methods(kind):
    """The names of a class's own methods and those of its bases."""
    names = [name for name in dir(kind) if not name.startswith("__")]
    return [name for name in names if inspect.isroutine(inspect.getattr_static(kind, name))]


def counted(kind):
    """Return (a subclass all of whose methods count their calls, the counts)."""
    counts = {name: [] for name in methods(kind) if name not in REFUSED}

    def counting(name):
        def method(self, *args, **kwargs):
            counts[name].append(1)
            return getattr(super(made, self), name)(*args, **kwargs)

        return method

    made = type(kind.__name__, (kind,), {name: counting(name) for name in counts})
    return made, counts


def run(library, folder, name="Trainer"):
    """Train with evaluations, checkpoints and accumulation, predict, save, resume. Returns (counts, of callbacks)."""
    trainer_kind, counts = counted(getattr(library, name))
    callback_kind, of_callbacks = counted(transformers.TrainerCallback)
    generates = name == "Seq2SeqTrainer"
    generation = transformers.GenerationConfig(max_length=6, num_beams=2, decoder_start_token_id=0, pad_token_id=0)
    more = {
        "max_steps": 4, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True,
        **({"predict_with_generate": True, "generation_config": generation} if generates else {}),
        **({"ddp_backend": "gloo"} if zerofn.world_size() > 1 else {}),
    }  # fmt: skip
    arguments = library.Seq2SeqTrainingArguments if generates else library.TrainingArguments
    given = {"train_dataset": rows(40), "eval_dataset": rows(8), "callbacks": [callback_kind()]}
    model = build_t5() if generates else build()
    trainer = trainer_kind(model=model, args=arguments(**options(folder, **more)), **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.predict(rows(4))
    trainer.save_model(str(folder / "last"))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return tuple({name: len(calls) for name, calls in x.items()} for x in (counts, of_callbacks))


def build_t5():
    torch.manual_seed(3)
    return transformers.T5ForConditionalGeneration(t5_config(50))


def both(folder, name):
    return [run(library, folder / library.__name__, name) for library in (transformers, ours)]


def test_every_method_has_a_line_in_the_table():
    names = {x for kind in (transformers.Trainer, transformers.Seq2SeqTrainer) for x in methods(kind)}
    assert not {name for name in names if not name.startswith("_")} ^ set(TABLE)
    assert set(PRIVATE) | REFUSED <= names


@pytest.mark.part(name=["Trainer"])
@pytest.mark.parametrize("name", ["Trainer", "Seq2SeqTrainer"])
def test_methods_and_hooks_are_called_as_often(tmp_path, name):
    check(*both(tmp_path, name))


@pytest.mark.whole
@pytest.mark.parametrize("name", ["Trainer", "Seq2SeqTrainer"])
def test_methods_and_hooks_are_called_as_often_on_ranks(ranks, tmp_path, name):
    check(*ranks(2, both, tmp_path, name, group=False)[0])


def check(plain, moved):
    (theirs, of_theirs), (mine, of_mine) = plain, moved
    assert of_mine == of_theirs and sum(of_theirs.values()) > 50
    assert of_theirs.keys() == {name for name, n in of_theirs.items() if n} | {"on_push_begin"}
    differs = {name for name, n in theirs.items() if mine[name] != n}
    captured = {name for name, what in TABLE.items() if what == CAPTURED}
    assert differs - captured == set(PRIVATE)
    assert all(mine[name] for name in captured)
    assert {name for name, what in TABLE.items() if what == SCRIPT} == {
        name for name, n in theirs.items() if name in TABLE and not n and name != "call_model_init"
    }
