"""`compile(deterministic=True)`: what it turns on where models compute on a device. The host needs none of it."""

import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from zerofn.comm.transport import Sums
from zerofn.runtime import repeatable
from zerofn.util.process import the

MODULE = build(3)


def modes():
    cudnn, fill = torch.backends.cudnn, torch.utils.deterministic
    return (
        the(Sums).in_rank_order,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        fill.fill_uninitialized_memory,
    )


@pytest.fixture
def beside_a_device(monkeypatch):
    monkeypatch.setattr(repeatable, "_is_host", lambda device: False)


def seen_by(**options):
    """The modes in which a step is captured and runs."""
    found = []
    train_step = train_step_of(MODULE)

    def step(state, batch):
        found.append(modes())
        return train_step(state, batch)

    class Backend:
        def bind(self, program):
            return self

        def run(self, inputs):
            found.append(modes())
            raise ZeroDivisionError

        def close(self):
            pass

    with pytest.raises(ZeroDivisionError):
        zerofn.compile(step, backend=Backend(), **options)(state_of(MODULE, 3), batch_of())
    return found


def test_capture_and_run_are_repeatable_and_the_rest_is_as_before(beside_a_device):
    before = modes()
    assert set(seen_by(deterministic=True)) == {(True, True, False, True, False, False)}
    assert modes() == before and set(seen_by()) == {before}


def test_on_the_host_nothing_changes():
    assert set(seen_by(deterministic=True)) == {modes()}
    state, options = state_of(MODULE, 3), ({}, {"deterministic": True})
    found = [zerofn.compile(train_step_of(MODULE), donate=False, **x)(state, batch_of()) for x in options]
    assert_same_trees(*[(zerofn.unshard(state.params), aux) for state, aux in found])


def test_an_operation_that_does_not_repeat_is_an_error(beside_a_device):
    def step(state, batch):
        x = zerofn.gather(state["params"])["w"]
        return torch.zeros(3, dtype=torch.half).put(torch.tensor([0, 0]), x[:2].half()).sum()

    state = zerofn.shard({"params": {"w": torch.ones(4)}})
    assert zerofn.compile(step)(state, {}) == 1
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        zerofn.compile(step, deterministic=True)(state, {})


@pytest.mark.parametrize("value", [None, ":8:8", ":4096:8"])
def test_cublas_has_to_be_told_before(beside_a_device, monkeypatch, value):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if value is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    before, devices = modes(), [torch.device("cpu"), torch.device("cuda", 0)]
    if value == ":4096:8":
        with repeatable.repeatable(devices):
            assert modes()[0]
    else:
        with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"), repeatable.repeatable(devices):
            pass
    assert modes() == before


def unlike():
    step = zerofn.compile(train_step_of(MODULE), deterministic=torch.distributed.get_rank() == 0)
    with pytest.raises(RuntimeError, match="deterministic"):
        step(state_of(MODULE, 3), batch_of())
    return True


def test_ranks_ask_for_repeatable_runs_alike(ranks):
    assert all(ranks(2, unlike))
    ranks.stop()
