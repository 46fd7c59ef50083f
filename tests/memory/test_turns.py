"""Steps, captures and saves of several threads take turns; inside a step a compiled step is its function."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import zerofn
from zerofn import optim
from zerofn.memory import turns

SIZE = 6


def make():
    return zerofn.TrainState.create(params={"w": torch.ones(SIZE, SIZE)}, tx=optim.sgd(0.1))


def sgd_step(state, x):
    loss, grads = state.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(x)
    return state.apply_gradients(grads), loss


def evaluate(state, x):
    return (x @ zerofn.gather(state.params)["w"]).square().mean()


inner, evaluation = zerofn.compile(sgd_step), zerofn.compile(evaluate)


def twice(state, x):
    before = evaluation(state, x)
    state, first = inner(state, x)
    state, second = inner(state, x)
    return state, (before, first, second, zerofn.unshard(state.params)["w"].sum())


def batch(rank=0):
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(rank))


def twice_on_a_rank():
    found = []
    for run in (twice, zerofn.compile(twice)):
        state, aux = run(zerofn.shard(make), batch(zerofn.rank()))
        found.append((*aux, zerofn.unshard(state.params)["w"]))
    return found


def same(found):
    eager, compiled = found
    return all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_a_turn_that_an_interrupt_has_ended_is_given_back():
    def interrupted():
        turn = turns.StepTurn("step")
        turn.__enter__()  # and a signal's handler raises before `with` would call `__exit__`

    interrupted()
    state, _ = inner(zerofn.copy(make()), batch())
    with ThreadPoolExecutor(1) as other:
        other.submit(zerofn.copy, state).result(20)


def test_a_compiled_step_inside_a_step_is_its_function():
    assert same(twice_on_a_rank())


def test_a_compiled_step_inside_a_step_is_its_function_on_two_ranks(ranks):
    assert all(map(same, ranks(2, twice_on_a_rank)))


rate = 1.0


def scaled(state, x):
    return (state["w"] * x * rate).sum()


scaled = zerofn.compile(scaled)


def test_what_a_compiled_step_inside_a_step_reads_is_guarded():
    global rate
    outer, state, x = zerofn.compile(lambda state, x: scaled(state, x) + 1), {"w": torch.ones(2)}, torch.ones(2)
    rate = 1.0
    assert outer(state, x) == 3
    rate = 2.0
    assert outer(state, x) == 5


def test_a_compiled_step_inside_an_eager_region_is_its_function():
    region = zerofn.eager_region(lambda w, x: scaled({"w": w}, x), like=lambda w, x: w.new_empty(()))
    step = zerofn.compile(lambda state, x: region(state["w"], x) * 2)
    assert step({"w": torch.full((3,), 2.0)}, torch.ones(3)) == 12 * rate


CALLS = {
    "step.lower": lambda state, x: inner.lower(state, x),
    "step.profile": lambda state, x: inner.profile(state, x),
    "zerofn.plan": lambda state, x: zerofn.plan(sgd_step, make, x),
    "zerofn.save": lambda state, x: zerofn.save("nowhere/a", state),
    "zerofn.load": lambda state, x: zerofn.load("nowhere/a", state),
    "zerofn.load_safetensors": lambda state, x: zerofn.load_safetensors("nowhere/a.safetensors", state.params),
    "zerofn.verify": lambda state, x: zerofn.verify("nowhere/a"),
    "zerofn.export": lambda state, x: zerofn.export("nowhere/a", "nowhere/b"),
    "zerofn.shard": lambda state, x: zerofn.shard(make),
    "zerofn.copy": lambda state, x: zerofn.copy(state),
    "zerofn.even": lambda state, x: list(zerofn.even([1])),
    "zerofn.skeleton": lambda state, x: zerofn.skeleton(lambda: torch.nn.Linear(2, 2)),
    "zerofn.Checkpoints.restore_or": lambda state, x: zerofn.Checkpoints("nowhere").restore_or(state),
    "zerofn.Checkpoints.after_step": lambda state, x: zerofn.Checkpoints("nowhere").after_step(state),
    "zerofn.Checkpoints.save": lambda state, x: zerofn.Checkpoints("nowhere").save(state),
}


def refused(what):
    def step(state, x):
        CALLS[what](state, x)
        return sgd_step(state, x)

    with pytest.raises(zerofn.CaptureError, match=rf"{what} is called inside a step") as error:
        zerofn.compile(step)(zerofn.shard(make), batch())
    return str(error.value)


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_cannot_be_captured_is_refused(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(what)
    assert not list(tmp_path.iterdir())


def test_a_call_that_cannot_be_captured_is_refused_on_all_ranks(ranks):
    for what in ("step.lower", "zerofn.save", "zerofn.shard", "zerofn.even"):
        assert len(ranks(2, refused, what)) == 2


def count_up(state, x):
    loss, grads = state.value_and_grad(lambda p, x: -p["w"].sum() + 0 * x.sum())(x)
    return state.apply_gradients(grads), loss


def counter():
    return zerofn.TrainState.create(params={"w": torch.zeros(300_000)}, tx=optim.sgd(1.0))


def test_a_thread_saves_whole_states_beside_the_steps(tmp_path):
    step = zerofn.compile(count_up)
    box, over, saved = [step(zerofn.shard(counter), torch.zeros(1))[0]], threading.Event(), []

    def saves():
        while not over.is_set():
            try:
                zerofn.save(tmp_path / f"{len(saved)}", box[0])
            except RuntimeError as error:
                assert "This state was donated to count_up" in str(error)
            else:
                saved.append(tmp_path / f"{len(saved)}")

    thread = threading.Thread(target=saves)
    thread.start()
    for _ in range(40):
        box[0], _ = step(box[0], torch.zeros(1))
    over.set()
    thread.join()
    for path in saved:
        state = zerofn.load(path, like=counter())
        assert state.params["w"].unique().tolist() == [float(state.step)]


def in_threads(*works):
    """What each of these returns or raises, begun at once in threads of their own."""
    found, begin = [None] * len(works), threading.Barrier(len(works))

    def run(k, work):
        begin.wait()
        try:
            found[k] = work()
        except Exception as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=x) for x in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_one_of_two_threads_that_step_one_state_is_refused():
    step = zerofn.compile(count_up)
    state = step(zerofn.shard(counter), torch.zeros(1))[0]
    found = in_threads(*[lambda: step(state, torch.zeros(1))[0]] * 2)
    errors = [x for x in found if isinstance(x, Exception)]
    assert len(errors) == 1 and "This state was donated to count_up" in str(errors[0])
    (new,) = (x for x in found if not isinstance(x, Exception))
    assert zerofn.unshard(new.params)["w"].unique().tolist() == [2.0]


def test_steps_that_are_captured_in_two_threads_are_those_of_one():
    def work():
        state, step = zerofn.shard(make), zerofn.compile(sgd_step)
        for _ in range(3):
            state, loss = step(state, batch())
        return loss

    expected = work()
    assert all(torch.equal(x, expected) for x in in_threads(work, work))


def test_a_save_inside_a_running_step_is_refused(tmp_path):
    state = zerofn.shard(make)

    def saves(x):
        zerofn.save(tmp_path / "a", state)
        return x

    region = zerofn.eager_region(saves, like=lambda x: x.new_empty(x.shape))
    step = zerofn.compile(lambda state, x: region(x).sum())
    with pytest.raises(RuntimeError, match="zerofn.save was called while the step <lambda> runs in the same thread"):
        step(state, torch.ones(2))
