"""Ranks behind a notebook's cells, in a shell of IPython."""

import io
import os
import re
import signal
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import zerofn
from zerofn import optim
from zerofn.notebook import pool
from zerofn.notebook.cells import Status
from zerofn.notebook.pool import _local_store

pytestmark = pytest.mark.slow

TRAIN = """
%%ranks
import os, time, torch, zerofn
from zerofn import optim

def train_step(state, batch):
    grads, loss = torch.func.grad_and_value(lambda p: (zerofn.gather(p)["w"] * batch).square().mean())(state.params)
    return state.apply_gradients(grads), {"loss": loss}

init = lambda: zerofn.TrainState.create(params={"w": torch.arange(5.0)}, tx=optim.adamw(1e-2))
state, step = zerofn.shard(init, stage=3), zerofn.compile(train_step)
rank = int(os.environ.get("RANK", 0))
for k in range(3):
    state, metrics = step(state, torch.full((5,), 2.0))
print("loss", float(metrics["loss"]))
"""
WEIGHTS = "%%ranks\nprint(int(state.step), zerofn.unshard(state.params)['w'].tolist(), os.environ['WORLD_SIZE'])"


class Notebook:
    """A shell with the extension, and what its cells show."""

    def __init__(self):
        config = Config()
        config.HistoryManager.enabled = False
        self.shell = InteractiveShell.instance(config=config)
        self.run("%load_ext zerofn")

    def run(self, cell, within=60.0):
        """Run a cell, and return what it shows. What it raises is raised."""
        start = time.monotonic()
        with capture_output() as out:
            result = self.shell.run_cell(cell.lstrip("\n"))
        assert time.monotonic() - start < within
        self.shown, self.outputs = out.stdout + out.stderr, out.outputs
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            raise error
        return self.shown

    @property
    def pool(self):
        return self.shell.magics_manager.registry["RankMagics"].pool


def traceback_of(caught):
    """What a notebook shows of an error, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(caught.value._render_traceback_()))


@pytest.fixture(scope="module")
def shell():
    notebook = Notebook()
    yield notebook
    notebook.run("%ranks stop")
    InteractiveShell.clear_instance()


@pytest.fixture
def two(shell):
    """Two ranks that are well, or three of an earlier test: they take seconds to start."""
    if shell.pool is None or shell.pool.broken or shell.pool.dead:
        shell.run("%ranks stop")
        assert "2 ranks ready after" in shell.run("%ranks 2", within=300)
    return shell


@pytest.fixture
def none(shell):
    shell.run("%ranks stop")
    return shell


def test_a_cell_runs_on_all_ranks_and_shows_rank_0(two):
    shown = two.run("%%ranks\nimport os\nprint('here is', os.environ['RANK'])\nos.environ['RANK'] + '!'")
    assert "here is 0" in shown and "here is 1" not in shown and "[rank 1: 1 line" in shown
    assert two.outputs[0].data["text/plain"] == "'0!'"
    assert "here is 1" in two.run("%ranks output 1") and "here is 0" not in two.shown
    assert "2 ranks, processes" in two.run("%ranks") and "ready" in two.shown


def test_what_is_displayed_is_displayed_and_updated(two):
    two.run(
        "%%ranks\nfrom IPython.display import HTML, display\nhandle = display(HTML('<b>1</b>'), display_id=True)\n"
        "for k in range(3):\n    handle.update(HTML(f'<b>{k}</b>'))\nprint('over')"
    )
    shown = [x for x in two.outputs if "text/html" in x.data]
    assert [x.data["text/html"] for x in shown] == ["<b>1</b>", "<b>0</b>", "<b>1</b>", "<b>2</b>"]
    assert [x.update for x in shown] == [False, True, True, True]


def test_output_comes_while_the_cell_runs(two, monkeypatch):
    times = []

    class Stream:
        def write(self, text):
            times.append((time.monotonic(), text))

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", Stream())
    start = time.monotonic()
    two.shell.run_cell("%%ranks\nimport time\nprint('first', flush=True)\ntime.sleep(2)\nprint('second')")
    first = next(at for at, text in times if "first" in text)
    second = next(at for at, text in times if "second" in text)
    assert first - start < 1.5 < 1.8 < second - first


def test_an_error_of_all_ranks_is_shown_once(two):
    two.shell.history_manager.input_hist_parsed[:] = [""] * 71
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero") as caught:
        two.run("%%ranks\nx = 1\ny = x / 0")
    shown = traceback_of(caught)
    assert shown.count("division by zero") == 1 and "y = x / 0" in shown and "ranks" not in shown.lower()
    assert "Cell In[70], line 2" in shown
    assert two.run("%%ranks\nprint(x)") == "1\n[rank 1: 1 line; %ranks output 1 shows it]\n"


def test_a_name_of_the_notebooks_own_process(two):
    two.run("here_alone = 1")
    with pytest.raises(RuntimeError, match="NameError: name 'here_alone' is not defined") as caught:
        two.run("%%ranks\nhere_alone + 1")
    assert "'here_alone' was defined in a cell that ran in the notebook's own process" in traceback_of(caught)


@pytest.mark.whole
def test_a_rank_that_alone_calls_what_all_must_call_can_be_interrupted(two):
    two.run(TRAIN)
    alone = "%%ranks\nif zerofn.rank() == 0:\n    zerofn.unshard(state.params)"
    threading.Timer(4.0, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        two.run(alone)
    with pytest.raises(RuntimeError, match="zerofn.unshard: rank 0 was interrupted while it waited"):
        two.run("%%ranks\nzerofn.unshard(state.params)")
    two.run("%ranks stop")


def test_ranks_that_fail_alone_are_named(two):
    with pytest.raises(RuntimeError, match="On rank 1 of 2: ValueError: my own words") as caught:
        two.run("%%ranks\nimport os\nif os.environ['RANK'] == '1':\n    raise ValueError('my own words')")
    assert "raise ValueError('my own words')" in traceback_of(caught)
    assert "1" in two.run("%%ranks\nprint(1)")


def interrupt_after_steps(ranks, number):
    before = ranks._steps[:2].max()
    while ranks._steps[:2].max() - before < number:
        before = min(before, ranks._steps[:2].max())  # a cell begins with none
        time.sleep(0.01)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.whole
def test_an_interrupt_stops_all_ranks_before_the_same_step(two):
    two.run(TRAIN)
    threading.Thread(target=interrupt_after_steps, args=(two.pool, 3)).start()
    with pytest.raises(KeyboardInterrupt, match=r"before step \d+ of the cell, on all ranks"):
        two.run("%%ranks\nfor k in range(10**6):\n    state, _ = step(state, torch.full((5,), 2.0))", within=30)
    steps = two.run("%%ranks\nprint(int(state.step))")
    assert steps.splitlines()[0] == two.run("%ranks output 1").strip() and int(steps.splitlines()[0]) > 3
    two.run("%%ranks\nfor k in range(2):\n    state, _ = step(state, torch.full((5,), 2.0))\nprint(int(state.step))")
    assert int(two.shown.splitlines()[0]) == int(steps.splitlines()[0]) + 2


def test_an_interrupt_ends_cells_without_steps_too(two, monkeypatch):
    monkeypatch.setattr(pool, "_GRACE", 1.0)
    threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt, match="where each rank was"):
        two.run("%%ranks\nimport time\nfor k in range(600):\n    time.sleep(0.1)", within=15)
    assert "1" in two.run("%%ranks\nprint(1)")


def test_an_interrupt_while_output_is_shown_stops_the_ranks(two, monkeypatch):
    two.run(TRAIN)
    show, shown = pool.Shown.show, []

    def interrupted(self):
        shown.append(self)
        if len(shown) == 3:
            signal.raise_signal(signal.SIGINT)
        show(self)

    monkeypatch.setattr(pool.Shown, "show", interrupted)
    with pytest.raises(KeyboardInterrupt, match="Their states are intact"):
        two.run("%%ranks\nfor k in range(10**6):\n    state, _ = step(state, torch.full((5,), 2.0))", within=30)
    assert "1" in two.run("%%ranks\nprint(1)", within=30)


def test_every_cell_after_autoranks(two):
    two.run("%autoranks")
    assert "[rank 1" in two.run("import os\nprint(os.environ['RANK'])")
    two.run("%autoranks off")
    assert two.run("print('here')") == "here\n"


def by_one_process(steps):
    """The weights after steps of the same training without ranks."""
    init = {"w": torch.arange(5.0)}
    state = zerofn.shard(zerofn.TrainState.create(params=init, tx=optim.adamw(1e-2)), stage=3)

    def train_step(state, batch):
        grads, loss = torch.func.grad_and_value(lambda p: (zerofn.gather(p)["w"] * batch).square().mean())(state.params)
        return state.apply_gradients(grads), loss

    step = zerofn.compile(train_step)
    for _ in range(steps):
        state, _ = step(state, torch.full((5,), 2.0))
    return zerofn.unshard(state.params)["w"].tolist()


@pytest.mark.whole
def test_a_state_goes_on_with_other_ranks(two):
    two.run(TRAIN)
    assert two.run(WEIGHTS).splitlines()[0] == f"3 {by_one_process(3)} 2"
    shown = two.run("%ranks 3", within=300)
    assert "Moved: state." in shown and "step" in shown.partition("Lost:")[2] and "functions" in shown
    two.run("%%ranks\nimport os, torch, zerofn")
    assert two.run(WEIGHTS).splitlines()[0] == f"3 {by_one_process(3)} 3"
    two.run(TRAIN.replace("state, step = zerofn.shard(init, stage=3),", "step ="))
    assert two.run(WEIGHTS).splitlines()[0] == f"6 {by_one_process(6)} 3"


@pytest.mark.whole
def test_a_rank_that_dies_is_told_and_a_restart_goes_on_from_the_last_save(two, tmp_path):
    two.run(TRAIN)
    two.run(f"%%ranks\nzerofn.save({str(tmp_path / 'run')!r}, state)")
    saved = two.run(WEIGHTS).splitlines()[0]
    two.run("%%ranks\nfor k in range(2):\n    state, _ = step(state, torch.ones(5))")
    assert two.run(WEIGHTS).splitlines()[0] != saved
    victim = two.pool.pids[1]
    threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        two.run("%%ranks\nfor k in range(10**6):\n    state, _ = step(state, torch.ones(5))")
    assert time.monotonic() - start < 11
    with pytest.raises(RuntimeError, match=f"rank 1 has ended.*%ranks restart continues from .*{tmp_path / 'run'}"):
        two.run("%%ranks\nprint(1)")
    shown = two.run("%ranks restart", within=300)
    assert "Loaded from the last checkpoint: state." in shown and "metrics" in shown.partition("Lost:")[2]
    two.run("%%ranks\nimport os, torch, zerofn")
    assert two.run(WEIGHTS).splitlines()[0] == saved


@pytest.mark.whole
def test_one_rank_that_fails_while_the_other_waits_ends_both(two, monkeypatch):
    monkeypatch.setattr(pool, "_GRACE", 1.0)
    two.run(TRAIN)
    cell = (
        "%%ranks\nif rank == 1:\n    raise ValueError('shard 17 is unreadable')\nstate, _ = step(state, torch.ones(5))"
    )
    with pytest.raises(RuntimeError, match=r"On rank 1 of \d: ValueError: shard 17 is unreadable") as caught:
        two.run(cell, within=20)
    assert "stopped, because" not in traceback_of(caught)
    with pytest.raises(RuntimeError, match="rank 1 failed alone, .*shard 17.*%ranks restart"):
        two.run("%%ranks\nprint(1)")


def test_without_ranks_cells_run_here_and_say_so_once(none):
    said = "There are no ranks, so %%ranks cells run in the notebook's own process. %ranks 2 starts two ranks."
    assert said in none.run(TRAIN) and "loss" in none.shown
    assert said not in none.run("%%ranks\nprint(1)")
    assert "There are no ranks, so cells run in the notebook's own process" in none.run("%autoranks on")
    none.run("%autoranks off")
    assert "3 [" in none.run(WEIGHTS.replace("os.environ['WORLD_SIZE']", "'one'"))
    assert "No ranks" in none.run("%ranks")


def test_a_process_that_ends_before_it_is_a_rank_is_told_with_its_last_words(none, monkeypatch):
    monkeypatch.setattr(pool, "_ENGINE", "tests.notebook.no_engine")
    with pytest.raises(RuntimeError, match=r"%ranks 2: a process ended before it was a rank.\nno room for an engine"):
        none.run("%ranks 2")
    assert none.pool is None


def test_the_line_of_a_start_is_written_over_in_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    status = Status()
    status.tell("unseen")
    monkeypatch.setattr(out, "isatty", lambda: True)
    status.tell("Starting 2 ranks: 1 of 2 processes run")
    status.tell("Starting 2 ranks: 1 of 2 processes run")
    status.end("2 ranks")
    line = "Starting 2 ranks: 1 of 2 processes run, 0 s"
    assert out.getvalue() == f"\r{line}\r{'2 ranks'.ljust(len(line))}\n"


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("%ranks 0", r"%ranks 0: expected 1 or more"),
        ("%ranks -3", r"%ranks -3: expected 1 or more"),
        ("%ranks all", r"%ranks all: write %ranks N to start N ranks"),
        ("%ranks restart", r"no ranks run. Write %ranks N"),
        ("%ranks output 3", r"no ranks run"),
        ("%autoranks maybe", r"write %autoranks, %autoranks on or %autoranks off"),
    ],
)
def test_what_cannot_be_is_a_sentence(none, line, sentence):
    with pytest.raises(Exception, match=sentence):
        none.run(line)


def test_a_kernel_that_is_a_rank_has_none(none):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="this kernel has joined a process group as a rank"):
            none.run("%ranks 2")
    finally:
        dist.destroy_process_group()


def test_the_extension_may_be_loaded_twice(none):
    before = len(none.shell.input_transformers_cleanup)
    none.run("%load_ext zerofn")
    zerofn.load_ipython_extension(none.shell)
    assert len(none.shell.input_transformers_cleanup) == before


def test_the_store_listens_on_this_machine_alone():
    store = _local_store()
    listening = {x.laddr.ip for x in psutil.Process().net_connections() if x.laddr.port == store.port and not x.raddr}
    assert listening == {"127.0.0.1"}
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
