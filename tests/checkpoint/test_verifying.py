"""`verify` reads every byte."""

import random

import pytest
import torch.distributed as dist

import zerofn
from tests.support.checkpoint_states import train_state


def saved_and_verified(path):
    zerofn.save(path, zerofn.shard(train_state(7), stage=3))
    assert zerofn.verify(path) == []
    dist.barrier()
    files = sorted(path.iterdir())
    for file in files:
        at, bit = random.Random(file.name).randrange(file.stat().st_size), 1 << random.Random(0).randrange(8)
        data = file.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        dist.barrier()
        faults = zerofn.verify(path)
        assert len(faults) == 1 and file.name in faults[0] and "damaged" in faults[0], (file, at, faults)
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(data)
        dist.barrier()
    assert zerofn.verify(path) == []
    return len(files)


@pytest.mark.parametrize("size", [2, 3])
def test_one_bit_in_each_file(ranks, tmp_path, size):
    assert ranks(size, saved_and_verified, tmp_path / "a") == [size + 1] * size


def test_what_is_no_checkpoint(tmp_path):
    assert "does not exist" in zerofn.verify(tmp_path / "a")[0]
    zerofn.save(tmp_path / "a", train_state(7))
    (file,) = (tmp_path / "a").glob("rank*")
    file.unlink()
    assert "is missing" in zerofn.verify(tmp_path / "a")[0]
