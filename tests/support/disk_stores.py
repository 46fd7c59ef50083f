"""Stores for the tests: small blocks, several threads, and a look at what lies in their files."""

import contextlib
import os

import torch

from zerofn.offload.disk import PAGE, Store, aligned

BLOCK = 2 * PAGE


def small_store(*folders, nbytes=1 << 20, name="moments", block=BLOCK, depth=3):
    return Store(folders, nbytes, name=name, block=block, depth=depth)


def filled(nbytes, seed=0):
    """An aligned buffer of random bytes."""
    buffer = aligned(nbytes)
    generator = torch.Generator().manual_seed(seed)
    return buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=generator))


def written(store, nbytes, label="layers.3 exp_avg", seed=0):
    """A region that holds `filled(nbytes, seed)`, and those bytes."""
    region, data = store.allocate(nbytes, label), filled(nbytes, seed)
    store.write(region, data).wait()
    return region, data


def files_of(store):
    """The files of a store, one of each drive."""
    return store._engine.files


@contextlib.contextmanager
def behind_its_back(store, drive=0):
    """A second descriptor of a store's file, which has no name any more."""
    fd = os.open(f"/proc/self/fd/{files_of(store)[drive].fd}", os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)
