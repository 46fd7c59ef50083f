"""A copy is the same state in other memory."""

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of, train_step_of


def goes_on(stage, precision):
    module = build(3)
    step = zerofn.compile(train_step_of(module))
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = [batch_of(rank, seed=k) for k in range(3)]
    state, _ = step(state_of(module, stage, precision=precision), batches[0])
    kept = zerofn.copy(state)
    ends = []
    for start in (state, zerofn.copy(kept), kept):
        for batch in batches[1:]:
            start, _ = step(start, batch)
        ends.append(zerofn.unshard(start))
    assert_same_trees(ends[1], ends[0])
    assert_same_trees(ends[2], ends[0])


@pytest.mark.part(num_ranks=[2])
@pytest.mark.parametrize(
    ("num_ranks", "stage", "precision"), [(1, 3, "bf16"), (2, 1, None), (2, 3, "bf16"), (3, 0, None)]
)
def test_a_copy_goes_on_as_the_state_does(ranks, num_ranks, stage, precision):
    ranks(num_ranks, goes_on, stage, precision)


def test_plain_trees_and_what_was_donated(tmp_path):
    tree = {"a": torch.ones(3), "b": [torch.zeros(2)]}
    twin = zerofn.copy(tree)
    assert_same_trees(twin, tree)
    assert twin["a"].data_ptr() != tree["a"].data_ptr()
    state = state_of(build(2), 3)
    zerofn.compile(train_step_of(build(2)))(state, batch_of())
    with pytest.raises(RuntimeError, match=r"zerofn.copy\(state\)"):
        zerofn.copy(state)
    state = state_of(build(2), 3, offload=zerofn.Offload(optimizer="nvme", path=tmp_path))
    with pytest.raises(RuntimeError, match="is on a drive and cannot be copied"):
        zerofn.copy(state)
