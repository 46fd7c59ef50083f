"""What drives read for a device is copied on a stream of its own, and its place is taken again once it was copied."""

import pytest
import torch

from zerofn.comm.transport import wait_
from zerofn.memory.arena import Arena
from zerofn.offload import drive_tensor
from zerofn.offload.copy_engine import CopyEngine, Landed
from zerofn.offload.disk import pages, scratch_space

SIZE = 5000


class Event:
    """A copy that ends when somebody waits for it on the host."""

    def __init__(self):
        self.over = False

    def query(self):
        return self.over

    def synchronize(self):
        self.over = True


@pytest.fixture
def copied(monkeypatch):
    """The copies to the device "meta", and what the device's stream has waited for."""
    found, waited = [], []

    def copy(engine, out, x, device, waited=False):
        found.append((Event(), out.device, x.clone(), x.data_ptr()))
        return found[-1][0]

    monkeypatch.setattr(CopyEngine, "copy", copy)
    monkeypatch.setattr(Landed, "wait", lambda landed, timeout=None: waited.append(landed._event))
    return found, waited


def test_the_host_does_not_wait_for_the_copy(tmp_path, copied):
    found, waited = copied
    nbytes = 4 * SIZE
    arena, store = Arena(nbytes), scratch_space((str(tmp_path),), 2 * pages(nbytes))
    regions = [store.allocate(nbytes, f"part {k}") for k in range(2)]
    handles = [drive_tensor.handle_of(region) for region in regions]
    for k, handle in enumerate(handles):
        drive_tensor.DriveTensor(handle, torch.float32, SIZE).save(torch.full((SIZE,), 1.0 + k))
    outs = []
    for handle in handles:  # into one place
        out = drive_tensor.fetch(handle, SIZE, torch.float32, [arena.number, 0], torch.device("meta"))
        assert [event.over for event, *_ in found] == [True] * len(outs)  # its place is free
        outs.append(wait_(out))
        assert not found[-1][0].over and waited == [event for event, *_ in found]
    assert [x.tolist() for _, _, x, _ in found] == [[1.0] * SIZE, [2.0] * SIZE]
    assert len({address for *_, address in found}) == 1 and all(x.device.type == "meta" for x in outs)
