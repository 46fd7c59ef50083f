"""Pipelines: a step that is cut has the bits of the same step uncut, in which every leaf is sent to all ranks."""

import math

import pytest
import torch

from benchmarks.mesh.training import assert_same_training, plain, trained
from zerofn.comm.transport import SentBytes
from zerofn.util.process import the

CASES = [("gpt2, 4 layers", {"pipe": 2}, 3, "zbv", 3)]  # Llama's, by 1f1b: tests/parallel/test_pipe.py
WHOLE = [
    ("llama", {"pipe": 2}, 0, "1f1b", 4),
    ("llama, 4 layers", {"pipe": 2, "data": 2}, 2, "interleaved", 3),
    ("t5", {"pipe": 2}, 1, "zb-h1", 2),
    ("llama, 4 layers", {"pipe": 3}, 1, "1f1b", 4),
    ("llama, 4 layers", {"pipe": 4}, 3, "zb-h1", 6),
    ("llama, 4 layers", {"pipe": 2}, 3, "interleaved-zb", 1),
    ("llama", {"pipe": 2, "replicate": 2}, 3, "gpipe", 3),
    ("gpt2", {"pipe": 2, "tensor": 2}, 3, "zb-h1", 3),
    ("llama", {"pipe": 2, "context": 2}, 2, "1f1b", 3),
    ("mixtral", {"pipe": 2, "expert": 2}, 3, "zb-h1", 3),
    ("mixtral", {"pipe": 2}, 0, "1f1b", 3),
    ("mixtral, balanced", {"pipe": 2, "expert": 2}, 0, "1f1b", 1),  # a transfer's result is what crosses
    ("bert", {"pipe": 2}, 3, "gpipe", 4),
    ("llama, 2 key heads", {"pipe": 2, "data": 2, "tensor": 2}, 3, "1f1b", 3),
]


def both(name, sizes, stage, schedule, num_microbatches):
    """Training by a pipeline, and uncut, with the bytes that each has sent."""
    found = []
    for passes in (None, lambda known: [x for x in known if x.name != "cut_stages"]):
        before = sum(the(SentBytes).by_group.values())
        more = {"num_microbatches": num_microbatches, "pipe": {"schedule": schedule}, "compiles": {"passes": passes}}
        found += [trained(name, sizes, stage, **more), sum(the(SentBytes).by_group.values()) - before]
    return found


@pytest.mark.parametrize(
    ("name", "sizes", "stage", "schedule", "num_microbatches"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.whole) for case in WHOLE)],
    ids=str,
)
def test_cut_steps_are_uncut_ones(ranks, name, sizes, stage, schedule, num_microbatches):
    found = ranks(math.prod(sizes.values()), both, name, sizes, stage, schedule, num_microbatches)
    tied = any(word in name for word in ("gpt2", "t5", "bert"))  # several holders add their terms in another order
    for (losses, params, _), sent, (uncut_losses, uncut, _), sent_uncut in found:
        for a, b in zip(losses, uncut_losses, strict=True):
            assert abs(a - b) <= 1e-12 * tied * abs(b)
        largest = max(x.abs().max() for x in uncut.values())
        for key, x in uncut.items():
            assert torch.equal(params[key], x) or tied and (params[key] - x).abs().max() <= 1e-12 * largest, key
        assert sent != sent_uncut
    assert_same_training([each[0] for each in found], plain(name))
