"""What loaders say of themselves comes back as it was, and nothing else is taken."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.some import some_of
from zerofn.checkpoint import CheckpointError, as_json

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    LEAVES,
    lambda x: st.lists(x) | st.lists(x).map(tuple) | st.dictionaries(st.text() | st.integers() | st.binary(), x),
    max_leaves=20,
)


@settings(
    max_examples=len(some_of(range(100), *range(30))), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(VALUES)
def test_values_come_back_as_they_were(value):
    assert as_json.loads(as_json.dumps(value, "state"), "it") == value


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_tensors(dtype, shape):
    x = torch.randint(0, 2, shape).to(dtype)
    back = as_json.loads(as_json.dumps({"rng": (x,)}, "state"), "it")["rng"][0]
    assert back.dtype == dtype and torch.equal(back, x)


@pytest.mark.parametrize("x", [np.arange(6.0).reshape(2, 3), np.int64(4), np.zeros((0, 2), np.uint32), np.bool_(True)])
def test_arrays(x):
    back = as_json.loads(as_json.dumps([x], "state"), "it")[0]
    assert type(back) is type(x) and back.dtype == x.dtype and np.array_equal(back, x)


@pytest.mark.parametrize("x", [{1}, object(), np.array(["a"]), print, 1 + 2j])
def test_a_value_that_json_cannot_hold_is_named_with_its_place(x):
    with pytest.raises(
        TypeError, match=r"^state\['rng'\]\[1\] is a .*cannot be saved with a state. state_dict\(\) may return"
    ):
        as_json.dumps({"rng": [1, x]}, "state")


@pytest.mark.parametrize(
    "text", ["", "{}", '{"set": []}', '{"dict": [[1]]}', '{"bytes": "%"}', '{"tensor": ["F32", [2], "AAAA"]}']
)
def test_a_text_of_another_kind_cannot_be_read(text):
    with pytest.raises(CheckpointError, match="it cannot be read"):
        as_json.loads(text, "it")
