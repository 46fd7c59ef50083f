"""Copies from a device are ordered by events: what they read is freed one copy later, and never by the host."""

import contextlib
import gc
import weakref

import pytest
import torch

from zerofn.offload.copy_engine import CopyEngine

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Device:
    """Streams and events that log what waits for what."""

    def __init__(self):
        self.log, self.num_events = [], 0

    def stream(self, name):
        return Stream(self, name)


class Stream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_stream(self, other):
        self.device.log.append((self.name, "waits for stream", other.name))

    def wait_event(self, event):
        self.device.log.append((self.name, "waits for event", event.number))

    def record_event(self):
        self.device.num_events += 1
        return Event(self.device, self.device.num_events)

    def synchronize(self):
        self.device.log.append(("host", "waits for stream", self.name))


class Event:
    def __init__(self, device, number):
        self.device, self.number = device, number

    def synchronize(self):
        self.device.log.append(("host", "waits for event", self.number))


class Block:
    """A tensor's memory on a device."""

    def __init__(self, device, address):
        self.device, self.address = device, address

    def data_ptr(self):
        return self.address

    def copy_(self, x, non_blocking):
        assert non_blocking

    def record_stream(self, stream):
        raise AssertionError("record_stream leaves the reuse of memory to the host")


@pytest.fixture
def device(monkeypatch):
    found = Device()
    compute = found.stream("compute")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: found.stream(f"copies {len(found.log)}"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return found


def test_a_source_is_freed_after_the_device_has_waited_for_its_copy(device):
    engine, alive = CopyEngine(), []
    for k in range(4):
        x = Block(CUDA, 100 + k)
        alive.append(weakref.ref(x))
        engine.copy(Block(CPU, 200 + k), x, CUDA)
        del x
        gc.collect()
        assert [ref() is not None for ref in alive] == [False] * k + [True]
        if k:
            assert ("compute", "waits for event", k) in device.log
    assert not any(who == "host" for who, *_ in device.log)
    engine.wait_for_all()
    gc.collect()
    assert device.log[-1] == ("host", "waits for event", 4) and alive[-1]() is None


def test_copies_to_the_device_keep_nothing(device):
    engine = CopyEngine()
    out = Block(CUDA, 1)
    kept = weakref.ref(out)
    engine.copy(out, Block(CPU, 2), CUDA)
    del out
    gc.collect()
    assert kept() is None  # its reader keeps it, and waits for it


def test_a_failed_device_keeps_nothing(device):
    engine = CopyEngine()
    engine.copy(Block(CPU, 1), Block(CUDA, 2), CUDA)
    engine.end()
    assert not engine._reading
