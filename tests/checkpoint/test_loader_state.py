"""Where a loader stands: saved in the ranks' files, however large, and told apart by digests."""

import json
import logging

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from zerofn.checkpoint import loader_state
from zerofn.checkpoint import manifest as written


class Shuffled:
    """A loader that keeps the order of all rows: its state has more bytes than the job's store takes at once."""

    def __init__(self, seed=0, rows=1_300_000):
        self.state = {"order": torch.randperm(rows, generator=torch.Generator().manual_seed(seed)), "at": seed}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def begun(path, loader):
    checkpoints = zerofn.Checkpoints(path, loader=loader, signals=(), async_=False)
    return checkpoints, checkpoints.restore_or(zerofn.shard({"params": {"w": torch.arange(8.0)}}, stage=3))


def saved_and_restored(path, own):
    """Save, and let other loaders go on; return the bytes of the ranks' files."""
    seed = dist.get_rank() if own else 0
    checkpoints, state = begun(path, Shuffled(seed))
    checkpoints.after_step(state)
    checkpoints.save(state)
    loader = Shuffled(7, rows=5)
    begun(path, loader)
    assert_same_trees(loader.state, Shuffled(seed).state)
    assert zerofn.verify(checkpoints.path(1)) == []
    return [file.stat().st_size for file in sorted(checkpoints.path(1).glob("rank-*"))]


@pytest.mark.parametrize("own", [False, True])
def test_a_large_state_is_in_the_ranks_files(ranks, tmp_path, own):
    """Once where it is the same on all ranks."""
    first, second = ranks(2, saved_and_restored, tmp_path, own)[0]
    assert first > 8 * 1_300_000 and (second > 8 * 1_300_000) == own
    assert (tmp_path / "step-00000001/manifest.json").stat().st_size < 10_000


def test_where_it_stood_in_the_manifest_is_read_too(tmp_path):
    """As checkpoints have it that were written before."""
    loader = Shuffled(3, rows=4)
    checkpoints, state = begun(tmp_path, loader)
    checkpoints.save(state)
    text = (tmp_path / "step-00000000/manifest.json").read_text()
    manifest = json.loads(text)
    manifest["notes"]["ranks"] = [loader_state.text_of(loader)]
    old = written._lines({**manifest, "sha256": written._ZEROS})
    (tmp_path / "step-00000000/manifest.json").write_text(old.replace(written._ZEROS, written._digest(old), 1))
    other = Shuffled(4, rows=9)
    begun(tmp_path, other)
    assert_same_trees(other.state, loader.state)


def test_a_damaged_state_is_passed_over(tmp_path, caplog):
    checkpoints, state = begun(tmp_path, Shuffled(3, rows=400))
    checkpoints.save(state)
    checkpoints.after_step(state)
    checkpoints.save(state)
    (file,) = checkpoints.path(1).glob("rank-*")
    data = bytearray(file.read_bytes())
    data[data.index(b'{"dict"') + 9] ^= 1
    file.write_bytes(data)
    assert begun(tmp_path, Shuffled(4, rows=7))[0].step == 0
    assert "damaged: the bytes of 'zerofn/loader' from 0 on" in caplog.text


class Fails(Shuffled):
    """One rank's loader fails."""

    def state_dict(self):
        return 1 / dist.get_rank() if self.state is None else self.state

    def load_state_dict(self, state):
        if dist.get_rank() == 0:
            raise ValueError("of another data set")


def failing(path):
    loader = Fails(rows=3)
    checkpoints, state = begun(path, loader)
    checkpoints.save(state)
    loader.state, errors = None, []
    for work in (lambda: checkpoints.save(state), lambda: begun(path, loader)):
        with pytest.raises(Exception) as caught:
            work()
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
    return errors


def test_a_loader_that_fails_on_one_rank_is_told_on_all(ranks, tmp_path):
    first, second = ranks(2, failing, tmp_path)
    assert (
        first[0] == "CheckpointError: zerofn.save: ZeroDivisionError: division by zero"
        and "rank 0 failed: ZeroDivisionError" in second[0]
    )
    assert first[1] == "ValueError: of another data set" and "rank 0 failed: of another data set" in second[1]


class Stateful(Shuffled):
    """What torchdata's `StatefulDataLoader` says of itself, without or with workers."""

    def __init__(self, yielded, workers=0, finished=False):
        self.state = {"_iterator_finished": finished}
        if workers:
            self.state |= {"_snapshot": {"_snapshot_step": yielded - 1}, "_steps_since_snapshot": 1}
        else:
            self.state |= {"_num_yielded": yielded}

    def __len__(self):
        return 4


@pytest.mark.parametrize("loader, words", [
    (Stateful(4), True), (Stateful(4, workers=2), True), (Stateful(3), False), (Stateful(3, workers=1), False),
    (Stateful(4, finished=True), False), (Shuffled(rows=3), False),
])  # fmt: skip
def test_a_loader_that_stood_at_the_end_of_its_epoch_is_told(tmp_path, caplog, loader, words):
    checkpoints, state = begun(tmp_path, loader)
    checkpoints.save(state)
    with caplog.at_level(logging.WARNING):
        begun(tmp_path, loader)
    assert ("the first loop over it yields no batch" in caplog.text) == words
