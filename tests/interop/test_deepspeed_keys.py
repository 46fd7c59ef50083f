"""The table of DeepSpeed's keys."""

import re

import pytest

from zerofn.interop.deepspeed_keys import flat, known, row_of, turned_off, unknown


def test_rows_are_whole_sentences_of_a_known_kind():
    for row in known().values():
        assert row.fate in ("mapped", "decided", "none", "refused"), row
        assert re.search(r"\w", row.what) and (row.fate == "mapped" or row.what.endswith((".", ")"))), row
        assert row.off is None or row.fate == "refused", row


def test_blocks_are_flattened():
    config = {"a": 1, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "fp16": {}}
    assert dict(flat(config)) == {"a": 1, "zero_optimization.stage": 3, "zero_optimization.offload_param.device": "cpu"}


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("zero_optimization.stage", "zero_optimization.stage"),
        ("optimizer.params.lr", "optimizer.params.*"),
        ("elasticity", "elasticity.**"),
        ("compression_training.weight_quantization.shared_parameters.enabled", "compression_training.**"),
        ("optimizer.parameters", None),
        ("optimizer.params.deep.er", None),
        ("stage", None),
    ],
)
def test_rows_stand_for_keys(key, row):
    found = row_of(key)
    assert (found and found.key) == row


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimiser", "optimizer"),
        ("zero_optimization.offload_optimizer.devise", "zero_optimization.offload_optimizer.device"),
        ("stage", "zero_optimization.stage"),
        ("fp16.bf16_optimizer_states", "bf16.bf16_optimizer_states"),
    ],
)
def test_the_nearest_key_is_named(key, meant):
    assert f"did you mean {meant!r}" in unknown(key)


def test_refused_blocks_that_are_not_enabled_ask_for_nothing():
    row = row_of("elasticity.enabled")
    assert turned_off(row, "elasticity.enabled", False, {"elasticity": {"enabled": False}})
    assert not turned_off(row, "elasticity.enabled", True, {"elasticity": {"enabled": True}})
    deep = {"data_efficiency": {"data_sampling": {"enabled": True}}}
    assert not turned_off(row_of("data_efficiency.seed"), "data_efficiency.seed", 1, deep)
