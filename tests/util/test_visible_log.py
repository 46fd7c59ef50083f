"""Log lines are seen where nobody has set up logging, and as set up where somebody has."""

import contextlib
import io
import logging
import sys

import pytest
import torch

import zerofn
from zerofn.util.visible_log import LOG, show_log


@contextlib.contextmanager
def no_logging():
    """Inside, standard error of a process without logging: pytest's own handlers are taken away."""
    root, handlers, level = logging.getLogger(), list(logging.getLogger().handlers), LOG.level
    root.handlers, LOG.handlers, LOG.filters = [], [], []
    LOG.setLevel(logging.NOTSET)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as text:
            yield text
    finally:
        root.handlers, LOG.handlers, LOG.filters = handlers, [], []
        LOG.setLevel(level)


@pytest.fixture(autouse=True)
def first_rank(monkeypatch):
    monkeypatch.delenv("ZEROFN_LOG", raising=False)
    monkeypatch.delenv("RANK", raising=False)


def test_a_capture_and_a_recapture_are_one_line_each():
    with no_logging() as stderr:
        step = zerofn.compile(lambda state, x: (state, (state["w"] * x).sum()), donate=False)
        for rows in (2, 2, 3):
            step({"w": torch.ones(1)}, torch.ones(rows))
        first, second = stderr.getvalue().splitlines()
        assert first.startswith("<lambda>: captured (first call): training step, ")
        assert second.startswith("<lambda>: captured again (batch [2] float32 -> [3] float32): training step, ")


def test_off_leaves_logging_as_it_is(monkeypatch):
    with no_logging():
        monkeypatch.setenv("ZEROFN_LOG", "off")
        show_log()
        assert LOG.handlers == [] and LOG.level == logging.NOTSET
        monkeypatch.setenv("ZEROFN_LOG", "loud")
        with pytest.raises(ValueError, match="ZEROFN_LOG='loud' is not known; write 'off'"):
            zerofn.compile(lambda state, x: state)


@pytest.mark.parametrize("logger", ["", "zerofn"])
def test_a_handler_of_the_users_is_enough(logger):
    with no_logging() as stderr:
        mine = logging.NullHandler()
        logging.getLogger(logger).addHandler(mine)
        show_log()
        LOG.info("unseen")
        assert LOG.handlers == [mine] * (logger != "") and stderr.getvalue() == ""


def test_other_ranks_show_warnings_alone(monkeypatch):
    with no_logging() as stderr:
        monkeypatch.setenv("RANK", "1")
        show_log()
        LOG.info("said by rank 0")
        LOG.warning("said by all")
        assert stderr.getvalue() == "said by all\n"


def test_a_handler_that_the_root_logger_gets_later_shows_the_lines_instead():
    with no_logging() as stderr:
        show_log()
        LOG.info("one")
        own = io.StringIO()
        root = logging.getLogger()
        root.addHandler(logging.StreamHandler(own))
        assert root.level == logging.WARNING
        LOG.info("two")
        LOG.warning("three")
        assert (stderr.getvalue(), own.getvalue()) == ("one\n", "three\n")
        assert LOG.handlers == [] and LOG.filters == [] and LOG.level == logging.NOTSET


def test_on_a_terminal_a_line_of_progress_is_written_over(monkeypatch):
    with no_logging() as stderr:
        monkeypatch.setattr(stderr, "isatty", lambda: True)
        show_log()
        sys.stderr.write("10/20  loss 3")
        LOG.info("captured")
        assert stderr.getvalue() == "10/20  loss 3\r\x1b[Kcaptured\n"
