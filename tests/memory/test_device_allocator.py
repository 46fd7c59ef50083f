"""What torch's allocator of CUDA devices is told of budgets, with a device that is not there."""

import types

import pytest
import torch

import zerofn
from zerofn.memory import device_allocator
from zerofn.memory.device_allocator import DeviceLimits, hold
from zerofn.util.process import instead

GIB = 1 << 30
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch):
    """A device of 80 GiB, of which torch has allocated `allocated`; `told`: what torch's allocator was told."""
    found = types.SimpleNamespace(allocated=0, told=[])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: found.allocated)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=80 * GIB)
    )
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, device: found.told.append(part * 80)
    )
    monkeypatch.setattr(device_allocator, "set_allocator", found.told.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    with instead(DeviceLimits()):
        yield found


def test_a_budget_limits_the_process_and_a_step_without_one_does_not(device):
    device.allocated = 5 * GIB
    hold(DEVICE, 16 * GIB, 3 * GIB)
    assert device.told == ["expandable_segments:True", pytest.approx(2 + 16 + 2)]
    hold(DEVICE, 4 * GIB, 5 * GIB)  # the larger one holds
    assert len(device.told) == 2
    hold(DEVICE, 24 * GIB, 9 * GIB)
    assert device.told[2:] == [pytest.approx(24 + 3)]
    hold(DEVICE, None, 0)
    hold(DEVICE, 2 * GIB, 0)
    assert device.told[3:] == [1.0 * 80]


def test_steps_without_a_budget_tell_nothing(device):
    hold(DEVICE, None, GIB)
    hold(torch.device("cpu"), GIB, GIB)
    assert device.told == []


def test_a_small_budget_leaves_room_for_workspace(device):
    hold(DEVICE, GIB, 0)
    assert device.told[1:] == [pytest.approx(2)]
    hold(torch.device("cuda", 1), 200 * GIB, 0)
    assert device.told[2:] == [80.0]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:64"])
def test_the_environment_is_kept(device, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    hold(DEVICE, GIB, 0)
    found = [x for x in device.told if isinstance(x, str)]
    assert found == ([] if "segments" in value else [f"{value},expandable_segments:True"])


def test_torch_takes_the_settings():
    """Without a device, too."""
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        zerofn._torch_compat.set_allocator("expandable_segments:True")
        assert "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


def test_a_compiled_step_tells_its_budget(monkeypatch):
    told = []
    monkeypatch.setattr("zerofn.runtime.captured_step.hold", lambda *args: told.append(args))
    state = zerofn.shard({"params": {"w": torch.ones(2048)}})
    read = lambda state, batch: zerofn.gather(state["params"])["w"].sum()  # noqa: E731
    for options in ({}, {"memory": "1MiB"}):
        zerofn.compile(read, **options)(state, {})
    assert told == [(torch.device("cpu"), budget, 4 * 2048) for budget in (None, 1 << 20)]
