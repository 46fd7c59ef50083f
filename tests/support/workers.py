"""Tests in several processes, forked when all tests are collected: `pytest --workers 4`.

What tests import is imported once, where workers of pytest-xdist would each import it. A worker takes the next file
that nobody has taken; each has fixtures of a session of its own. A worker that dies fails the test that it ran, and
another goes on with what is left of the file.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pickle import dumps, loads  # a test may put others in pickle's place
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest import runner


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, metavar="N", help="run tests in N forked processes, 0: in this one"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if not option.workers or option.collectonly or (session.testsfailed and not option.continue_on_collection_errors):
        return None  # pytest's own loop
    with tempfile.TemporaryDirectory(prefix="workers-") as folder:
        crew = _Crew(session, Path(folder))
        try:
            crew.run(option.workers)
        finally:
            crew.end()
    return True


@dataclass
class _Worker:
    """As its parent sees it. `tests`: those of its file that have not ended."""

    pid: int
    connection: Connection
    tests: list[pytest.Item]


class _Crew:
    """All workers of a session."""

    def __init__(self, session: pytest.Session, folder: Path) -> None:
        self.session, self.folder = session, folder
        files = itertools.groupby(session.items, lambda item: item.path)
        self._files = [list(items) for _, items in files][::-1]  # the next one is the last
        self._workers: list[_Worker] = []
        self._num_started = 0
        if reporter := session.config.pluginmanager.getplugin("terminalreporter"):
            reporter.showfspath = False  # files take turns

    def run(self, num_workers: int) -> None:
        for _ in range(min(num_workers, len(self._files))):
            self._start()
        while self._workers:
            ready = wait([worker.connection for worker in self._workers])
            for worker in [worker for worker in self._workers if worker.connection in ready]:
                self._hear(worker)
            if self.session.shouldfail:
                raise self.session.Failed(self.session.shouldfail)
            if self.session.shouldstop:
                raise self.session.Interrupted(self.session.shouldstop)

    def end(self) -> None:
        for worker in self._workers:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)

    def _start(self) -> None:
        ours, theirs = Pipe()
        self._num_started += 1
        folder = self.folder / str(self._num_started)
        folder.mkdir()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ours.close()
                for worker in self._workers:
                    worker.connection.close()
                _work(self.session, theirs, folder)
                status = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(status)
        theirs.close()
        self._workers.append(_Worker(pid, ours, []))

    def _hear(self, worker: _Worker) -> None:
        """What a worker says: a hook's name and arguments, or "take" for its next tests; or that it has ended."""
        try:
            name, arguments = loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._workers.remove(worker)
            worker.connection.close()
            _, status = os.waitpid(worker.pid, 0)
            if worker.tests:
                self._fail(worker.tests.pop(0), os.waitstatus_to_exitcode(status))
                if worker.tests:
                    self._files.append(worker.tests)
            if self._files:
                self._start()
            return
        hook = self.session.config.hook
        if name == "take":
            worker.tests = self._files.pop() if self._files else []
            first = self.session.items.index(worker.tests[0]) if worker.tests else 0
            worker.connection.send((first, len(worker.tests)))
        elif name == "report":
            hook.pytest_runtest_logreport(
                report=hook.pytest_report_from_serializable(config=self.session.config, data=arguments)
            )
        elif name == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=arguments)
        else:
            getattr(hook, name)(**arguments)
            if name == "pytest_runtest_logfinish":
                worker.tests.pop(0)

    def _fail(self, item: pytest.Item, code: int) -> None:
        text = f"the process of this test ended with exit code {code}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


# --- in the worker -------------------------------------------------------------------------------


class _Tells:
    """A plugin that tells the parent what this process's hooks are told."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self._works = False
        config.pluginmanager.register(self)  # here come the warnings of the collection, which the parent has
        self._works = True

    def tell(self, name: str, arguments: Any) -> None:
        self._connection.send_bytes(dumps((name, arguments)))

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.tell("pytest_runtest_logstart", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.tell("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self.tell("report", hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        if not self._works:
            return
        w = warning_message
        plain = warnings.WarningMessage(str(w.message), w.category, w.filename, w.lineno)
        given = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self.tell("warning", given)


def _work(session: pytest.Session, connection: Connection, folder: Path) -> None:
    """A worker's life: run tests file by file, until there is none or the parent has ended."""
    plugins = session.config.pluginmanager
    # Its file's position is shared with the parent and all workers.
    if capture := plugins.getplugin("capturemanager"):
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    if reporter := plugins.unregister(name="terminalreporter"):
        plugins.register(SimpleNamespace(_tw=reporter._tw), "terminalreporter")  # what a test that hangs prints to
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)  # of `tmp_path`
    tells = _Tells(session.config, connection)
    for tests in _files(session, tells, connection):
        for k, item in enumerate(tests):
            # Behind the last one of a file nothing but the session's fixtures is kept.
            following = tests[k + 1] if k + 1 < len(tests) else session
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                return
    runner.pytest_sessionfinish(session)


def _files(session: pytest.Session, tells: _Tells, connection: Connection) -> Iterator[list[pytest.Item]]:
    while True:
        tells.tell("take", None)
        first, count = connection.recv()
        if not count:
            return
        yield session.items[first : first + count]
