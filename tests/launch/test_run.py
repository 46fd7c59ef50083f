"""`zerofn.run`: functions on ranks of their own."""

import linecache
import os
import signal
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

import zerofn
from zerofn import optim


def test_a_function_of_a_test_trains_on_ranks_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a folder of its own: other tests run jobs beside it
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def loss_fn(params, batch):
        return (batch @ params["w"]).square().mean()

    def train(stage, steps):
        def step(state, batch):
            loss, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads), {"loss": loss}

        state = zerofn.TrainState.create(params={"w": torch.ones(4, 3)}, tx=optim.adamw(0.1))
        state = zerofn.shard(state, stage=stage)
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for _ in range(steps):
            state, aux = step(state, x.chunk(size)[rank].clone())
        return {"w": zerofn.unshard(state.params)["w"], "loss": float(aux["loss"]), "ranks": size}

    found, plain = zerofn.run(train, 3, ranks=2, steps=3), train(0, 3)
    assert found["ranks"] == 2 and found["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    torch.testing.assert_close(found["w"], plain["w"])
    assert {number: signal.getsignal(number) for number in before} == before
    assert not list(tmp_path.iterdir()) and "RANK" not in os.environ


@pytest.mark.whole
def test_the_first_error_is_raised_with_its_lines():
    def fails(state):
        if int(os.environ["RANK"]) == 1:
            raise KeyError(f"not in {state}")
        zerofn.collectives.all_reduce(torch.ones(2))  # waits for rank 1

    with pytest.raises(KeyError, match="not in here") as error:
        zerofn.run(fails, "here", ranks=2)
    (note,) = error.value.__notes__
    assert note.startswith("Raised by rank 1 of 2:") and 'raise KeyError(f"not in {state}")' in note
    assert "worker.py" not in note


@pytest.mark.whole
def test_lines_of_a_cell_are_shown():
    source = "def fails():\n    raise ValueError('in a cell')\n"
    names = {}
    linecache.cache["<ipython-input-7>"] = (len(source), None, source.splitlines(True), "<ipython-input-7>")
    exec(compile(source, "<ipython-input-7>", "exec"), names)
    with pytest.raises(ValueError, match="in a cell") as error:
        zerofn.run(names["fails"], ranks=1)
    assert 'File "<ipython-input-7>", line 2, in fails' in error.value.__notes__[0]
    assert "raise ValueError('in a cell')" in error.value.__notes__[0]


@pytest.mark.whole
def test_an_error_whose_class_cannot_travel_is_a_sentence():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def fails():
        raise Odd(1, 2)

    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        zerofn.run(fails, ranks=1)


@pytest.mark.whole
def test_a_rank_that_is_killed_is_named():
    def killed():
        zerofn.collectives.all_reduce(torch.ones(2))
        if int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        zerofn.collectives.all_reduce(torch.ones(2))

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of 2 was killed by SIGKILL"):
        zerofn.run(killed, ranks=2)
    assert time.monotonic() - began < 30


@pytest.mark.whole
def test_a_process_that_the_function_forks_leaves_no_result():
    def forks(way):
        child = os.fork()
        if child == 0:
            if way == "raises":
                raise ValueError("in the child only")
            return "of the child"
        os.waitpid(child, 0)
        time.sleep(0.5)
        return "of the rank"

    assert [zerofn.run(forks, way, ranks=1) for way in ("raises", "returns")] == ["of the rank"] * 2


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True])
def test_numbers_of_ranks_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="ranks must be a whole number of 1 or more, got"):
        zerofn.run(print, ranks=wrong)


@pytest.mark.whole
def test_what_cannot_travel_is_a_sentence():
    state = zerofn.shard(zerofn.TrainState.create(params={"w": torch.ones(3)}, tx=optim.sgd(0.1)))
    with pytest.raises(TypeError, match=r"with its arguments, contains a Sharded.*zerofn.unshard\(state\)"):
        zerofn.run(print, state)
    with pytest.raises(TypeError, match="the result contains a Sharded"):
        zerofn.run(lambda: zerofn.shard({"params": {"w": torch.ones(3)}}), ranks=1)
    with pytest.raises(TypeError, match="cannot be sent to another process.*lock"):
        import threading

        zerofn.run(print, threading.Lock())
    with pytest.raises(TypeError, match="expected a function, got int"):
        zerofn.run(3)


@pytest.mark.whole
def test_in_a_rank_it_says_what_to_call():
    with pytest.raises(RuntimeError, match="this process is already a rank"):
        zerofn.run(lambda: zerofn.run(print), ranks=1)
