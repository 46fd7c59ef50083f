"""Signals on which runs stop: none is forgotten, and afterwards each has the handler that it had before."""

import logging
import os
import signal
import threading

import pytest
import torch

import zerofn
from zerofn.runs.signals import Handlers
from zerofn.runs.stopping import Stopped
from zerofn.util.process import instead

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def handlers():
    """New ones, and the system's again afterwards; what they pass on is noted, and does not end the tests."""
    came = []
    before = {number: signal.signal(number, lambda n, frame: came.append(n)) for number in (TERM, USR1)}
    with instead(Handlers()):
        yield came
    for number, handler in before.items():
        signal.signal(number, handler)


def begun(path, **options):
    checkpoints = zerofn.Checkpoints(path, **options)
    checkpoints.restore_or({"w": torch.zeros(3)})
    return checkpoints


def test_a_signal_saves_after_the_step_and_a_second_one_is_passed_on(tmp_path, handlers):
    checkpoints, before = begun(tmp_path), signal.getsignal(TERM)
    checkpoints.after_step({"w": torch.zeros(3)})
    signal.raise_signal(USR1)
    assert handlers == []
    signal.raise_signal(TERM)
    assert handlers == [TERM]
    with pytest.raises(Stopped, match="stopped after step 2, because of SIGUSR1") as caught:
        checkpoints.after_step({"w": torch.zeros(3)})
    assert caught.value.code == 75 and checkpoints.steps() == [2] and signal.getsignal(TERM) is not before
    checkpoints.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_runs_are_closed_in_any_order(tmp_path, handlers, order):
    before = signal.getsignal(TERM)
    runs = [begun(tmp_path / "a"), begun(tmp_path / "b")]
    runs[order[0]].close()
    assert signal.getsignal(TERM) is not before
    runs[order[1]].close()
    assert signal.getsignal(TERM) is before
    signal.raise_signal(TERM)
    assert handlers == [TERM]


def test_both_of_two_runs_hear_a_signal(tmp_path):
    runs = [begun(tmp_path / "a"), begun(tmp_path / "b")]
    signal.raise_signal(TERM)
    for run in runs:
        with pytest.raises(Stopped):
            run.after_step({"w": torch.zeros(3)})
        assert run.steps() == [1]


def test_a_signal_after_the_last_step_stops_as_the_run_is_closed(tmp_path, caplog):
    checkpoints = begun(tmp_path, every=1)
    checkpoints.after_step({"w": torch.zeros(3)})
    signal.raise_signal(TERM)
    with pytest.raises(
        Stopped, match=r"stopped when the run was closed, because of SIGTERM, after step 1.* \[1\]"
    ) as caught:
        checkpoints.close()
    assert caught.value.code == 75 and str(caught.value) in caplog.text
    checkpoints.close()


def test_while_an_error_is_on_its_way_the_next_run_answers_a_signal(tmp_path):
    with pytest.raises(ZeroDivisionError):
        first = begun(tmp_path / "a")
        try:
            signal.raise_signal(TERM)
            raise ZeroDivisionError
        finally:
            first.close()
    second = begun(tmp_path / "b")
    with pytest.raises(Stopped, match="after step 1, because of SIGTERM"):
        second.after_step({"w": torch.zeros(3)})
    assert second.steps() == [1]
    begun(tmp_path / "c").close()


def test_a_run_that_cannot_be_restored_listens_no_more(tmp_path):
    before = signal.getsignal(TERM)
    zerofn.save(tmp_path / "step-00000001", {"v": torch.zeros(3)})
    with pytest.raises(zerofn.CheckpointError, match="has no leaf 'w'"):
        begun(tmp_path)
    assert signal.getsignal(TERM) is before


def test_a_run_that_is_forgotten_without_close_passes_signals_on(tmp_path, handlers):
    begun(tmp_path / "a")
    signal.raise_signal(TERM)
    assert handlers == [TERM]
    begun(tmp_path / "b").close()
    signal.raise_signal(TERM)
    assert handlers == [TERM, TERM]


def test_another_librarys_handler_stays_and_may_keep_ours(tmp_path, handlers, caplog):
    """It is set over ours, passes on to it, and puts it back after the run has ended."""
    theirs = []
    checkpoints = begun(tmp_path / "a")
    ours = signal.signal(TERM, lambda n, frame: (theirs.append(n), ours(n, frame)))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            checkpoints.after_step({"w": torch.zeros(3)})
    assert caplog.text.count("SIGTERM: the program set another signal handler after restore_or") == 1
    other = begun(tmp_path / "b")  # over theirs
    signal.raise_signal(TERM)
    assert theirs == handlers == []
    for each in (checkpoints, other):
        with pytest.raises(Stopped):
            each.after_step({"w": torch.zeros(3)})
    signal.raise_signal(TERM)
    assert theirs == handlers == [TERM]
    signal.signal(TERM, ours)
    signal.raise_signal(TERM)
    assert handlers == [TERM, TERM] and theirs == [TERM]


def test_a_run_is_closed_in_another_thread(tmp_path, handlers):
    checkpoints = begun(tmp_path)
    thread = threading.Thread(target=checkpoints.close)
    thread.start()
    thread.join()
    signal.raise_signal(TERM)
    assert handlers == [TERM]


def test_it_begins_in_the_main_thread_alone(tmp_path):
    told = []

    def begin():
        with pytest.raises(ValueError, match="Python handles signals in the main thread only"):
            begun(tmp_path)
        told.append(True)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert told


def test_a_signal_ends_a_forked_process(tmp_path):
    """As it must end workers of a loader and of a pool, which have no step to save after."""
    for number in (TERM, USR1):
        signal.signal(number, signal.SIG_DFL)
    checkpoints = begun(tmp_path)
    child = os.fork()
    if child == 0:
        signal.raise_signal(TERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -TERM
    signal.raise_signal(TERM)
    with pytest.raises(Stopped):
        checkpoints.after_step({"w": torch.zeros(3)})


def test_a_signal_after_all_runs_ends_the_program(tmp_path):
    child = os.fork()
    if child == 0:
        signal.signal(TERM, signal.SIG_DFL)
        runs = [begun(tmp_path / "a"), begun(tmp_path / "b")]
        for each in runs:
            each.close()
        signal.raise_signal(TERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -TERM
