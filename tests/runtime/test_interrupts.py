import gc
import signal
import subprocess
import sys
import threading
import time

import pytest

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from zerofn.runtime import interrupts
from zerofn.runtime.interrupts import SOON, deliver, whole_steps
from zerofn.util.process import the


@pytest.fixture(autouse=True)
def handler(monkeypatch):
    """Python's own, also where a background job has inherited none; and what is held back stays so, stall or not."""
    monkeypatch.setattr(interrupts, "SOON", 60.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    the(interrupts.HeldInterrupts).clear()
    signal.signal(signal.SIGINT, before)


def interrupted():
    """What came of the rest of a step, in the middle of which somebody pressed Ctrl-C."""
    with whole_steps():
        signal.raise_signal(signal.SIGINT)
        return "the rest of the step"


def test_an_interrupt_waits_until_the_result_is_there():
    assert interrupted() == "the rest of the step"
    with pytest.raises(KeyboardInterrupt):
        deliver()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupts._interrupt()  # nor does it come twice, when its time is up
    deliver()


def test_it_comes_soon_where_no_step_follows(monkeypatch):
    monkeypatch.setattr(interrupts, "SOON", SOON)
    with pytest.raises(KeyboardInterrupt):
        assert interrupted() == "the rest of the step"
        for _ in range(600):  # no single sleep ends early
            time.sleep(0.1)
    deliver()


def test_the_handler_that_was_there_is_called_and_put_back():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *args: seen.append(args[0]))
    try:
        interrupted()
        assert seen == []
        deliver()
        assert seen == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_errors_pass_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="inside"), whole_steps():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_signals_alone():
    ran = []

    def work():
        with whole_steps():
            ran.append(signal.getsignal(signal.SIGINT))
        deliver()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [signal.getsignal(signal.SIGINT)]


ENDS = """
import os, signal, time
from zerofn.runtime.interrupts import deliver, whole_steps
signal.signal(signal.SIGINT, signal.{})
with whole_steps():
    signal.raise_signal(signal.SIGINT)
    print("whole", flush=True)
deliver()
print("after", flush=True)
"""


@pytest.mark.parametrize(
    ("handler", "status", "printed"), [("SIG_DFL", -signal.SIGINT, "whole"), ("SIG_IGN", 0, "whole after")]
)
def test_a_system_handler_keeps_its_meaning(handler, status, printed):
    done = subprocess.run([sys.executable, "-c", ENDS.format(handler)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, " ".join(done.stdout.split())) == (status, printed), done.stderr


def test_the_state_of_a_function_that_ctrl_c_ended():
    module = build(2)
    step = zerofn.compile(train_step_of(module))

    def fit():
        state = state_of(module, 3)
        for k in range(5):
            state, _ = step(state, batch_of(seed=k))
            if k == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit()
    gc.collect()
    assert step.state.step == 3
    found, _ = step(step.state, batch_of(seed=3))
    assert found is step.state
    expected = state_of(module, 3)
    for k in range(4):
        expected, _ = train_step_of(module)(expected, batch_of(seed=k))
    assert_same_trees(zerofn.unshard(found), zerofn.unshard(expected))
    step.state = None
