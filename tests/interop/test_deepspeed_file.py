"""Files that are no configuration, and values in place of "auto"."""

import math

import pytest

import zerofn
from zerofn.interop.deepspeed_file import check_keys, filled, read
from zerofn.interop.deepspeed_keys import blocks, known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("", "is not JSON"),
        ("[1]", r"expected a JSON object, \{...\}, got a list"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice in one block"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' occurs twice"),
    ],
)
def test_files_that_are_none(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="the file '.*missing.json' does not exist"):
        read(tmp_path / "missing.json")
    with pytest.raises(TypeError, match="the path of a JSON file or a dict, got int"):
        read(3)


def test_auto_is_filled_by_key_or_last_word():
    params = {"lr": "auto", "eps": "auto"}
    given = {"optimizer": {"type": "Adam", "params": params}, "train_batch_size": "auto", "steps_per_print": "auto"}
    found = filled(given, {"lr": 1e-3, "optimizer.params.eps": 1e-6})
    assert found == {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-6}}}
    with pytest.raises(ValueError, match='Pass the values that they stand for: auto={"optimizer.params.eps": ...}'):
        filled(given, {"lr": 1e-3})


def test_values_that_nobody_reads_are_errors():
    with pytest.raises(ValueError, match="'lr': ...} has no effect: the configuration has no key of that name"):
        filled({"train_batch_size": "auto"}, {"lr": 1e-3})
    with pytest.raises(ValueError, match="gradient_clipping is 1.0 in the configuration, but 0.5 in auto="):
        filled({"gradient_clipping": 1.0}, {"gradient_clipping": 0.5})


STRANGE = [math.inf, -math.inf, math.nan, 10**400, 10**5000, True, "x", [], ["fp16"], {"a": 1}, -7, 0.5]
KEYS = [
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping",
    "communication_data_type", "optimizer.type", "optimizer.params.lr", "optimizer.params.betas",
    "optimizer.params.eps", "optimizer.params.weight_decay", "scheduler.type", "scheduler.params.warmup_num_steps",
    "scheduler.params.warmup_max_lr", "scheduler.params.warmup_type", "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_optimizer.ratio", "bf16.enabled", "fp16.loss_scale", "fp16.initial_scale_power",
    "fp16.hysteresis", "data_types.grad_accum_dtype",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_another_type_or_range_is_told_with_its_key(key):
    """Each is taken, or refused by `ValueError` with the key; never an error of Python's own."""
    told = 0
    for value in STRANGE:
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "scheduler": {"type": "WarmupLR", "params": {}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}},
            "fp16": {"enabled": key.startswith("fp16")},
        }
        *above, last = key.split(".")
        block = config
        for name in above:
            block = block.setdefault(name, {})
        block[last] = value
        try:
            zerofn.from_deepspeed(config)
        except ValueError as error:
            assert last in str(error) and str(error).startswith("from_deepspeed: "), (value, error)
            assert len(str(error)) < 500
            told += 1
    assert told >= 5


def nested(key, value):
    """A configuration with one dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


WRONG = {
    "flag": ["true", 1, [], {}, math.nan],
    "whole": ["3", 2.5, True, math.inf, math.nan, -2, [3], {}],
    "number": ["3", True, math.inf, math.nan, -0.5, 10**400, [3], {}],
    "text": [3, True, ["x"], {}],
    "list": [3, "x", {}],
}


def test_every_key_takes_values_of_its_kind_alone():
    """Also a key without effect: whoever has misspelt its value means something else."""
    for row in known().values():
        if row.kind == "anything":
            continue
        check_keys(nested(row.key, row.default))
        if row.key not in blocks():
            check_keys(nested(row.key, "auto"))
        for value in WRONG[row.kind]:
            if value == {} and row.key in blocks():
                continue
            with pytest.raises(ValueError) as caught:
                check_keys(nested(row.key, value))
            assert str(caught.value).startswith(f"from_deepspeed: {row.key}: expected "), caught.value


@pytest.mark.parametrize("key", ["fp16", "zero_optimization.offload_param", "timers.throughput", "autotuning"])
@pytest.mark.parametrize("value", [3, "cpu", [1]])
def test_a_block_is_an_object(key, value):
    with pytest.raises(ValueError, match=rf"from_deepspeed: {key}: expected a JSON object"):
        zerofn.from_deepspeed(nested(key, value))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("flops_profiler.enabeld", "flops_profiler.enabled"),
        ("bfloat16.enabeld", "bf16.enabled"),
        ("zero_optimization.leaf_module.class", "zero_optimization.leaf_module.classes"),
        ("bf16.loss_scale.window", "fp16.loss_scale_window"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_in_every_block(key, meant):
    with pytest.raises(ValueError, match=rf"{key!r} is not a key of DeepSpeed's configuration; did you mean '{meant}"):
        check_keys(nested(key, 3))
