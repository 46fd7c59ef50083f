"""What a step draws or takes from outside at each call is refused: it would be a constant of the captured step."""

import io
import itertools
import os
import random
import secrets
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest
import torch
import tqdm

import zerofn
from tests.support.small_steps import captures_of
from zerofn.capture.changing_constants import is_moving, position_of, unmoved, watching

STATE, X = {"w": torch.ones(2)}, torch.ones(2)
own, of_numpy, legacy = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
draw = of_numpy.uniform


class Stream:
    """An iterator of one's own."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        return float(self.place)


class Holder:
    """An object that holds a generator and a stream."""

    def __init__(self):
        self.rng, self.stream = np.random.default_rng(0), iter([1.0, 2.0, 3.0])


def numbers():
    k = 0.0
    while True:
        k += 1
        yield k


def endless():
    """Yields what another iterator gives: the position is in that one."""
    yield from itertools.count(1.0)


holder, items, counted, generated, stream = (
    Holder(),
    iter([1.0, 2.0, 3.0, 4.0]),
    itertools.count(1),
    numbers(),
    Stream(),
)
paired, of_another = zip(itertools.count(1), [1.0, 2.0, 3.0, 4.0], strict=False), endless()
batches = iter(torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))

REFUSED = {
    "a generator of NumPy's": (lambda: of_numpy.uniform(), "draws from global .*of_numpy"),
    "a method of a generator": (lambda: draw(), "draws from global .*draw.*"),
    "an older generator of NumPy's": (lambda: legacy.rand(), "draws from global .*legacy"),
    "a generator of Python's": (lambda: own.gauss(0, 1), "draws from global .*own"),
    "an object's generator": (lambda: holder.rng.uniform(), "draws from global .*holder.rng"),
    "the global generators": (lambda: np.random.rand() + random.random(), "draws from (numpy.random|Python's random)"),
    "secrets": (lambda: secrets.randbelow(9), "calls secrets or random.SystemRandom"),
    "bytes of the system": (lambda: os.urandom(1)[0], "calls os.urandom, secrets or uuid"),
    "an identifier": (lambda: uuid.uuid4().int % 9, "calls os.urandom, secrets or uuid"),
    "torch's seed": (lambda: torch.initial_seed() % 9, r"calls torch.initial_seed\(\)"),
    "the next of a list": (lambda: next(items), "takes the next value of global .*items.*list_iterator"),
    "one of a loop": (lambda: next(x for x in items), "takes the next value of global .*items"),
    "a counter": (lambda: next(counted), "takes the next value of global .*counted"),
    "a generator": (lambda: next(generated), "takes the next value of global .*generated"),
    "a generator of another's values": (lambda: next(of_another), "takes the next value of global .*of_another"),
    "an iterator of one's own": (lambda: next(stream), "takes the next value of global .*stream"),
    "an object's iterator": (lambda: next(holder.stream), "takes the next value of global .*holder.stream"),
    "pairs": (lambda: next(paired)[1], "takes the next value of global .*paired"),
    "a loader": (lambda: next(batches), "takes the next value of global .*batches"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_another_value_at_each_call_is_refused_with_its_line(name):
    take, message = REFUSED[name]

    def step(state, x):
        doubled = 2 * x
        return doubled * take()

    with pytest.raises(
        zerofn.CaptureError, match=rf"(?s)the step {message}.*outside the step and pass it in the batch"
    ) as e:
        zerofn.compile(step)(STATE, X)
    assert f"at {__file__}:" in str(e.value) + "".join(getattr(e.value, "__notes__", []))


def test_the_line_of_a_draw_is_the_one_that_goes_on_behind_a_call():
    def doubled(x):
        return 2 * x

    def step(state, x):
        return doubled(x) * random.random()

    line = step.__code__.co_firstlineno + 1
    with pytest.raises(zerofn.CaptureError, match=f"draws from Python's random at {__file__}:{line}:"):
        zerofn.compile(step)(STATE, X)


def test_a_refused_draw_leaves_the_generators_as_they_were():
    before = own.getstate(), of_numpy.bit_generator.state, random.getstate()
    for take in (lambda: own.random(), lambda: of_numpy.normal(), lambda: random.random()):
        with pytest.raises(zerofn.CaptureError):
            zerofn.compile(lambda s, x: x * take())(STATE, X)  # noqa: B023  (called at once)
    assert before == (own.getstate(), of_numpy.bit_generator.state, random.getstate())


@pytest.mark.parametrize("take", [lambda: random.random(), lambda: np.random.rand()])
def test_another_thread_may_draw_and_its_draws_stay(take):
    began, done = threading.Event(), threading.Event()

    def step(state, x):
        began.set()
        assert done.wait(20)
        return 2 * x

    def draw():
        assert began.wait(20)
        drawn.append(take())
        done.set()

    drawn, thread = [], threading.Thread(target=draw)
    thread.start()
    torch.testing.assert_close(zerofn.compile(step)(STATE, X), 2 * X)
    thread.join()
    assert take() != drawn[0]  # it would be the same number if the generator had been set back

    def draws_too(state, x):
        began.set()
        assert done.wait(20)
        return x * take()

    began.clear(), done.clear()
    thread = threading.Thread(target=draw)
    thread.start()
    with pytest.raises(zerofn.CaptureError, match="the step draws from"):
        zerofn.compile(draws_too)(STATE, X)
    thread.join()


@pytest.mark.parametrize("take", [lambda: random.random(), lambda: np.random.rand()])
def test_the_line_of_a_draw_is_named_while_another_thread_draws(take):
    def draw():
        while not done.wait(1e-4):
            take()

    def step(state, x):
        y = 2 * x
        return y * take()

    done, line = threading.Event(), take.__code__.co_firstlineno
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with pytest.raises(zerofn.CaptureError, match=f"the step draws from .* at {__file__}:{line}:"):
            zerofn.compile(step)(STATE, X)
        assert torch.equal(zerofn.compile(lambda state, x: 2 * x if take else x)(STATE, X), 2 * X)
    finally:
        done.set()
        thread.join()


def test_a_draw_that_no_thread_is_seen_to_make_may_be_another_ones():
    bound, done, num = random.random, threading.Event(), [0]

    def draw():
        while not done.is_set():
            bound()
            num[0] += 1

    def step(state, x):
        before = num[0]
        while num[0] == before:
            time.sleep(1e-4)
        return 2 * x

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with pytest.raises(zerofn.CaptureError, match="If another thread draws from it meanwhile, give that thread a"):
            zerofn.compile(step)(STATE, X)
    finally:
        done.set()
        thread.join()


AFTERWARDS = """
import random, numpy as np, torch, zerofn
from torch._higher_order_ops.scan import scan

def step(state, x):
    return scan(lambda total, row: (total + row, total * row), torch.zeros(2), x * state["w"])[0]

zerofn.compile(step)({"w": torch.ones(2)}, torch.ones(3, 2))
for draws in (
    lambda x: x * random.randint(1, 9),
    lambda x: x * random.uniform(0, 1),
    lambda x: x * torch.from_numpy(np.random.normal(size=2)),
):
    torch.compile(draws, backend="eager", fullgraph=True)(torch.ones(2))
"""


def test_dynamo_knows_the_generators_functions_after_a_capture_in_which_it_first_ran():
    """It notes once, by identity, which functions it knows. Ours, which stand in their places while a step is
    captured, would leave it without them, and functions made later at the same addresses would be taken for NumPy's.
    """
    done = subprocess.run([sys.executable, "-c", AFTERWARDS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_what_is_only_held_may_move_between_calls():
    """Naming a generator or an iterator is no mistake, nor is drawing outside of the step."""

    def step(state, x):
        return x * (2 if of_numpy is not None and items is not None else 1)

    call = zerofn.compile(step)
    for _ in range(3):
        assert torch.equal(call(STATE, X), 2 * X)
        of_numpy.uniform()
    assert len(captures_of(call)) == 1


def test_what_the_step_makes_itself_may_move():
    def step(state, x):
        rng, places = random.Random(0), iter([1.0, 2.0])
        return x * rng.randrange(2, 3) * next(places)

    assert torch.equal(zerofn.compile(step)(STATE, X), step(STATE, X))


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: iter([1, 2]), lambda: iter(range(3)), lambda: iter({1: 2, 3: 4}.items()), lambda: iter("ab")),
        *(numbers, Stream, lambda: itertools.count(3), lambda: itertools.cycle([1, 2]), lambda: map(abs, [1, 2])),
        *(lambda: enumerate([1, 2]), lambda: itertools.chain([1], [2]), lambda: filter(None, [1, 2])),
        *(lambda: itertools.islice(itertools.count(), 9), lambda: zip([1, 2], [3, 4], strict=True)),
        *(lambda: reversed([1, 2]),),
    ],
)
def test_the_position_of_an_iterator_changes_when_something_is_taken(make):
    x = make()
    assert is_moving(x)
    before = position_of(x)
    assert position_of(x) == before
    next(x)
    assert position_of(x) != before


def test_the_position_of_a_file():
    with open(__file__) as x:
        before = position_of(x)
        next(x)
        assert position_of(x) != before


class Output(io.TextIOBase):
    """As a notebook's: it can be written, has no position, and counts what it was given."""

    def __init__(self):
        self.texts = []

    def write(self, text):
        self.texts = [*self.texts, text]
        return len(text)


@pytest.mark.parametrize("make", [lambda path: open(path, "w"), lambda path: Output()], ids=["a log", "an output"])
def test_a_step_may_write_to_a_stream_that_it_cannot_read(make, tmp_path):
    with make(tmp_path / "log") as stream:
        bar = tqdm.tqdm(range(2), file=stream)

        def step(state, batch):
            print("a line", file=stream)
            bar.set_postfix(mean=batch.mean().item())
            return state, batch.mean()

        _, mean = zerofn.compile(step)({"a": torch.ones(2)}, torch.ones(2))
    assert mean == 1


def test_only_what_moved_inside_is_told():
    outside, inside = random.Random(0), random.Random(0)
    with watching({"outside": outside, "inside": inside}):
        outside.random()
        with unmoved():
            pass
        with pytest.raises(RuntimeError, match="draws from inside"), unmoved():
            inside.random()
