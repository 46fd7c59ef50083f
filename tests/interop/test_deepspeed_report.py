"""The table that `zerofn config` prints."""

import pytest

from zerofn.interop.deepspeed_report import every_key, explained, summary, text

CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "zero_quantized_weights": True},
    "steps_per_print": 10,
    "elasticity": {"enabled": False},
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
}


def test_each_key_has_its_row():
    found = {key: (value, word) for key, value, word, _ in explained(CONFIG)}
    assert found["zero_optimization.stage"] == (3, "becomes")
    assert found["zero_optimization.reduce_bucket_size"] == (5e8, "decided")
    assert found["zero_optimization.zero_quantized_weights"] == (True, "refused")
    assert found["steps_per_print"] == (10, "no meaning") and found["elasticity.enabled"] == (False, "off")
    assert len(found) == 10
    with pytest.raises(ValueError, match="did you mean 'train_batch_size'"):
        explained({"train_batchsize": 3})


def test_the_text_has_every_row():
    out = text(explained(CONFIG), width=300)
    assert "fp16.enabled" in out and "shard(precision='fp16')" in out and len(out.splitlines()) == 11
    out = text(every_key(), "default", width=300)
    assert "zero_optimization.offload_param.max_in_cpu" in out and "(until 0.19.7)" in out


def test_in_80_columns_a_row_is_a_paragraph():
    out = text(explained(CONFIG), width=80)
    assert "zero_optimization.stage = 3: becomes\n    " in out and "fp16.enabled = True: becomes" in out
    everything = text(every_key(), "default", width=60)
    assert max(map(len, everything.splitlines())) <= 60
    assert "gradient_accumulation_steps (default 1): becomes\n    setup.num_microbatches" in everything


def test_the_arguments_are_code():
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    out = summary({**CONFIG, "zero_optimization": zero}, {}, 4)
    assert "stage=3, precision='fp16', offload=Offload(optimizer='cpu'" in out
    assert "zerofn.accumulate(state.value_and_grad(loss_fn), 2)(batch)  # 8 rows of a batch on each rank" in out
    assert "tx = chain(clip_by_global_norm(max_norm=1.0), adamw(learning_rate=0.0003" in out
    assert "loss_scale=DynamicLossScale(" in out
