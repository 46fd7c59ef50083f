import os
import signal
import threading

import pytest

from zerofn.runtime.failure import whole_steps


def test_an_interrupt_waits_for_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), whole_steps():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("the rest of the step")
    assert done == ["the rest of the step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_that_was_there_is_called_and_put_back():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *args: seen.append(args[0]))
    try:
        with whole_steps():
            os.kill(os.getpid(), signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        os.kill(os.getpid(), signal.SIGINT)
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

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [signal.getsignal(signal.SIGINT)]
