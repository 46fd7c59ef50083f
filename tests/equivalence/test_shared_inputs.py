"""What a step is given twice, in its state or beside it: one is written, and the other stays what it was."""

import pytest
import torch

import zerofn
from tests.support.small_steps import batch_of, build, loss_of, state_of
from zerofn import Offload, optim, tree

MODULE = build(6)


def beside(state, batch):
    """An update inside the backward pass, and what the batch holds, read at the end."""
    _, grads = state.value_and_grad(loss_of(MODULE))(batch["own"])
    given = batch["given"]
    leaves = tree.leaves(zerofn.gather(given) if zerofn.sharding.sharded.is_sharded(given) else given)
    norms = torch.stack([x.square().sum() for x in leaves])
    return state.apply_gradients(grads, on_nonfinite="ignore"), {"norms": norms}


@pytest.mark.part(how=[zerofn.gather], precision=["bf16"])
@pytest.mark.part(precision=["fp32"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", [lambda params: params, zerofn.gather])
def test_a_batch_that_holds_the_parameters(how, precision):
    """They are written before the step reads the batch for the last time."""

    def norms(given):
        state = state_of(MODULE, 3, precision=precision)
        own = tree.tree_map(lambda x: x.to(torch.bfloat16 if precision == "bf16" else x.dtype), batch_of())
        return zerofn.compile(beside)(state, {"own": own, "given": given(state.params)})[1]["norms"]

    assert torch.equal(norms(how), norms(lambda params: tree.tree_map(torch.clone, how(params))))


def test_one_place_on_a_drive_is_not_given_twice(tmp_path):
    offload = Offload(params="nvme", path=tmp_path)
    extra = {name: p.detach().clone() for name, p in MODULE.named_parameters()}
    state = state_of(MODULE, 3, optim.adamw(1e-2), extra=extra, offload=offload)
    with pytest.raises(RuntimeError, match=r"the state and the batch share one region on a drive, params\['0'\]"):
        zerofn.compile(beside)(state, {"own": batch_of(), "given": state.params})
    twice = state.replace(extra=state.params)
    with pytest.raises(RuntimeError, match=r"two entries of the state share one region on a drive, params\['0'\]"):
        zerofn.compile(beside)(twice, {"own": batch_of(), "given": {"x": torch.ones(1)}})
    filled, _ = zerofn.compile(lambda state, _: (state.replace(extra=state.params), {}))(state, {})
    zerofn.compile(beside)(filled, {"own": batch_of(), "given": {"x": torch.ones(1)}})


def test_an_untouched_entry_on_a_drive_is_not_shared_by_two_states(tmp_path):
    state = state_of(MODULE, 3, offload=Offload(params="nvme", path=tmp_path))
    step = zerofn.compile(lambda state, _: (state.replace(step=state.step + 1), {}), donate=False)
    with pytest.raises(RuntimeError, match=r"params\['0'\] is stored on a drive, .*donate=False"):
        step(state, {})
    zerofn.unshard(state)
