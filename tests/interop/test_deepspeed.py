"""DeepSpeed configurations become arguments, and what cannot is a sentence."""

import json

import pytest
import torch

import zerofn
from zerofn import optim
from zerofn.interop.deepspeed import from_deepspeed

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}}
# The one that Hugging Face's guide gives for ZeRO-3 with offload, its sizes filled in.
LARGE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def test_the_configuration_that_most_begin_with():
    auto = {
        "lr": 1e-4,
        "betas": [0.9, 0.98],
        "eps": 1e-6,
        "warmup_min_lr": 0,
        "weight_decay": 0.01,
        "bf16.enabled": True,
        "fp16.enabled": False,
        "gradient_clipping": 0.5,
        "warmup_num_steps": 100,
        "warmup_max_lr": 1e-4,
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
    }
    setup = from_deepspeed(LARGE, auto=auto, world=8)
    assert setup.shard == {"stage": 3, "precision": "bf16", "offload": zerofn.Offload("cpu", "cpu")}
    assert (setup.num_microbatches, setup.rows, setup.loss_scale) == (2, 8, None)
    schedule = optim.warmup_lr(0.0, 1e-4, 100)
    assert setup.schedule == schedule
    assert setup.tx == optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(schedule, 0.9, 0.98, 1e-6, 0.01))


def test_auto_that_nobody_fills_is_an_error():
    with pytest.raises(
        ValueError, match='Pass the values that they stand for: auto={"fp16.enabled": ..., "bf16.enabled": ..., '
    ):
        from_deepspeed(LARGE)


def test_a_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**ADAMW, "gradient_clipping": 0.0, "train_batch_size": 6}))
    setup = from_deepspeed(path, world=3)
    assert setup.tx == optim.adamw(3e-4, 0.9, 0.95, 1e-8, 0.1)
    assert setup.shard == {"stage": 0, "precision": "fp32"} and (setup.rows, setup.num_microbatches) == (2, 1)


def test_gradients_are_clipped_unless_it_is_turned_off():
    assert from_deepspeed(ADAMW).tx == optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(3e-4, 0.9, 0.95, 1e-8, 0.1)
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "bf16"),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "bf16"},
            zerofn.Precision(torch.float32, torch.bfloat16, torch.bfloat16),
        ),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            zerofn.Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ),
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            zerofn.Precision(torch.float16, torch.float16, torch.float16),
        ),
    ],
)
def test_precision(given, wanted):
    assert from_deepspeed({**ADAMW, **given}).shard["precision"] == wanted


def test_loss_scales():
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}
    scale = from_deepspeed({**ADAMW, "fp16": fp16}).loss_scale
    assert isinstance(scale, zerofn.DynamicLossScale) and float(scale.loss_scale) == 4096
    assert (scale.period, scale.hysteresis, scale.min_loss_scale) == (500, 3, 2)
    scale = from_deepspeed({**ADAMW, "fp16": {"enabled": True, "loss_scale": 128}}).loss_scale
    assert type(scale) is zerofn.StaticLossScale and float(scale.loss_scale) == 128


def test_checks_of_gradients_can_be_turned_off():
    off = {**ADAMW, "bf16": {"enabled": True, "check_grad_overflow": False}}
    assert from_deepspeed(off).on_nonfinite == "ignore" and from_deepspeed(ADAMW).on_nonfinite == "skip"


def test_tiers(tmp_path):
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "ratio": 0.5},
        "offload_param": {"device": "cpu"},
    }
    setup = from_deepspeed({**ADAMW, "zero_optimization": zero})
    assert setup.shard["offload"] == zerofn.Offload("nvme", "cpu", path=str(tmp_path), fraction=0.5)
    old = from_deepspeed({**ADAMW, "zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert old.shard["offload"] == zerofn.Offload("cpu")
    assert from_deepspeed({**ADAMW, "zero_optimization": True}).shard["stage"] == 1


def test_activations():
    assert from_deepspeed({**ADAMW, "activation_checkpointing": {"cpu_checkpointing": True}}).compile == {
        "remat": "full"
    }
    assert from_deepspeed({**ADAMW, "activation_checkpointing": {"profile": False}}).compile == {}


@pytest.mark.parametrize(
    ("given", "world", "found"),
    [
        ({"train_batch_size": 12}, 3, (4, 1)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, 3, (4, 2)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 4}, 3, (4, 4)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 3, (8, 4)),
        ({"train_micro_batch_size_per_gpu": 2}, 3, (2, 1)),
        ({"gradient_accumulation_steps": 4}, 3, (None, 4)),
        ({}, 3, (None, 1)),
    ],
)
def test_any_two_give_the_third(given, world, found):
    setup = from_deepspeed({**ADAMW, **given}, world=world)
    assert (setup.rows, setup.num_microbatches) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size": 13}, r"x ranks cannot hold with train_batch_size=13 on 3 ranks"),
        ({"train_batch_size": 2}, r"cannot hold with train_batch_size=2 on 3 ranks"),
        (
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            "train_batch_size=12, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4 on 3 ranks",
        ),
        ({"train_batch_size": 0}, "train_batch_size: expected a whole number of 1 or more, got 0"),
        ({"train_batch_size": 2.5}, "train_batch_size: expected a whole number, got 2.5"),
        ({"gradient_clip": 1.0}, "'gradient_clip' is not a key.*did you mean 'gradient_clipping'"),
        ({"zero_optimization": {"stage": 3, "stage3_prefetch_size": 1}}, "did you mean 'zero_optimization.stage3_pre"),
        ({"zero_optimization": {"stage": 4}}, "stage: expected 0, 1, 2 or 3, got 4"),
        ({"zero_optimization": []}, r"zero_optimization: expected a JSON object, \{...\}, got \[\]"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled: expected true or false, got 'yes'"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true. Choose one"),
        ({"communication_data_type": "int8"}, "communication_data_type: expected one of fp32, .*got 'int8'"),
        (
            {"communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp32"}},
            "communication_data_type=torch.float16 and data_types.grad_accum_dtype=torch.float32.*Make the two equal",
        ),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op='sum' has no counterpart.*multiply the loss"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights=True has no"),
        ({"sparse_attention": {"mode": "fixed", "enabled": True}}, "'sparse_attention.enabled' is not a key"),
        ({"sparse_attention": {"mode": "strided"}}, "sparse_attention.mode: expected one of fixed, dense"),
        ({"sparse_attention": {"num_random_blocks": 1}}, "num_random_blocks has no effect with mode 'fixed'"),
        ({"sparse_attention": {"num_local_blocks": 0}}, "num_local_blocks=0 must be 1 or more"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "mics_shard_size=8 has no counterpart"),
        ({"torch_autocast": {"enabled": True}}, "Write torch.autocast inside your loss function"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 0.5}}}, "ratio has no effect without"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "disk"}}},
            "offload_optimizer.device: expected one of none, cpu, nvme, got 'disk'",
        ),
    ],
)
def test_what_cannot_be_is_a_sentence(given, message):
    with pytest.raises(ValueError, match=message):
        from_deepspeed({**ADAMW, **given}, world=3)


@pytest.mark.parametrize(
    "given",
    [
        {"zero_optimization": {"stage": 1, "zero_quantized_weights": False, "zenflow": None}},
        {"tensorboard": {"enabled": True, "output_path": "x"}, "flops_profiler": {"enabled": False}},
        {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": False}}, "elasticity": {"enabled": False}},
        {"aio": {"block_size": 1, "thread_count": 2}, "compile": {"deepcompile": True}},
    ],
)
def test_what_asks_for_nothing_is_no_error(given):
    from_deepspeed({**ADAMW, **given})


def test_an_optimizer_of_ones_own():
    tx = optim.lion(1e-4)
    assert from_deepspeed({"gradient_clipping": 0}, tx=tx).tx is tx
    with pytest.raises(ValueError, match="has no optimizer.*tx="):
        from_deepspeed({})
    with pytest.raises(ValueError, match="has an optimizer, which tx= would replace"):
        from_deepspeed(ADAMW, tx=tx)


def test_sparse_attention_is_a_pattern():
    assert from_deepspeed(ADAMW).sparse_attention is None
    make = zerofn.sparse.deepspeed
    for given, pattern in (
        ({"mode": "fixed", "block": 32, "num_local_blocks": 8}, make.fixed(32, num_local_blocks=8)),
        ({"mode": "bigbird"}, make.bigbird(num_random_blocks=0)),  # the default of a configuration
        (
            {"num_global_blocks": 2, "attention": "unidirectional"},
            make.fixed(num_global_blocks=2, attention="unidirectional"),
        ),
        ({"mode": "variable", "local_window_blocks": [2, 4]}, make.variable(local_window_blocks=(2, 4))),
        ({"mode": "dense"}, make.dense()),
        ({}, make.fixed()),
        ({"mode": "bslongformer", "global_block_indices": [3]}, make.bslongformer(global_block_indices=[3])),
    ):
        assert from_deepspeed({**ADAMW, "sparse_attention": given}).sparse_attention == pattern
