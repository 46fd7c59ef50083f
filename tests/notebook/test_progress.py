"""The line of figures: what it shows, when it reads from the device, where it goes."""

import io
import json
import sys
import types

import pytest
import torch

import zerofn
from zerofn import optim
from zerofn.notebook import progress as module
from zerofn.notebook.progress import Line, leaves, number
from zerofn.notebook.sinks import JsonLines

BATCHES = [{"input_ids": torch.zeros(4, 8, dtype=torch.int64), "x": torch.zeros(4, 3)} for _ in range(7)]


@pytest.fixture
def clocked(monkeypatch):
    """A clock that goes on by half a second whenever it is looked at."""
    now = [0.0]

    def tick():
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr(module.time, "perf_counter", tick)


def test_a_line_at_every_third_step(clocked, capsys):
    bar = zerofn.progress(BATCHES, every=3)
    for k, _ in enumerate(bar):
        bar.log({"loss": torch.tensor(float(k))})
    assert [x["step"] for x in bar.records] == [3, 6, 7]
    assert [x["loss"] for x in bar.records] == [2.0, 5.0, 6.0]
    first, _, last = bar.records
    assert first["ms_per_step"] == pytest.approx(500 / 3) and first["tokens_per_s"] == 3 * 32 / 0.5
    assert first["eta_s"] == pytest.approx(4 * 0.5 / 3) and last["eta_s"] == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and lines[0].startswith("3/7  loss 2  167 ms/step  192 tokens/s")


def test_metrics_are_read_once_a_line(monkeypatch):
    reads = []
    monkeypatch.setattr(module, "number", lambda x: reads.append(x) or 1.0)
    bar = zerofn.progress(BATCHES, every=3)
    for k, _ in enumerate(bar):
        bar.log({"loss": k})
    assert reads == [2, 5, 6]


def test_what_a_state_says_is_shown(capsys):
    state = zerofn.TrainState.create(
        params={"w": torch.ones(2)}, tx=optim.sgd(0.1), loss_scale=zerofn.DynamicLossScale(1024.0)
    ).replace(skipped=torch.tensor(3))
    bar = zerofn.progress(BATCHES[:2], every=2)
    for _ in bar:
        bar.log(state=state, lr=0.5)
    (record,) = bar.records
    assert (record["skipped"], record["loss_scale"], record["lr"]) == (3, 1024.0, 0.5)
    assert "3 skipped  scale 1024" in capsys.readouterr().err


def test_rows_where_there_are_no_tokens_and_a_count_of_ones_own(clocked):
    bar = zerofn.progress([torch.zeros(6, 2)], every=1)
    assert list(bar) and bar.records[0]["rows_per_s"] == 12
    bar = zerofn.progress([torch.zeros(6, 2)], every=1, tokens=lambda batch: 100)
    assert list(bar) and bar.records[0]["tokens_per_s"] == 200


def test_a_generator_has_no_end_to_tell():
    bar = zerofn.progress((x for x in BATCHES), every=7)
    assert len(list(bar)) == 7 and "eta_s" not in bar.records[0]
    bar = zerofn.progress((x for x in BATCHES), every=1, total=14)
    assert len(list(bar)) == 7 and bar.records[-1]["eta_s"] > 0


def test_a_run_that_goes_on_counts_from_where_it_was(clocked):
    bar = zerofn.progress(BATCHES[:4], every=3, initial=2)
    assert len(list(bar)) == 4 and [x["step"] for x in bar.records] == [3, 6]
    assert bar.records[0]["ms_per_step"] == 500 and bar.records[0]["eta_s"] == 1.5
    bar = zerofn.progress([], initial=7, total=7)
    assert list(bar) == bar.records == []


def test_where_lines_go(tmp_path, monkeypatch):
    taken, logged = [], []
    sink = types.SimpleNamespace(write=taken.append, close=lambda: taken.append("closed"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(log=lambda x, step: logged.append((step, x))))
    path = tmp_path / "runs" / "log.jsonl"
    bar = zerofn.progress(BATCHES, every=4, to=[str(path), sink, "wandb"])
    for _ in bar:
        bar.log(loss=1.5)
    assert [json.loads(x) for x in path.read_text().splitlines()] == bar.records == taken[:-1]
    assert taken[-1] == "closed" and [step for step, _ in logged] == [4, 7] and logged[0][1]["loss"] == 1.5


def test_steps_before_must_be_a_number_of_steps():
    with pytest.raises(ValueError, match="initial must be a whole number of steps of 0 or more, got -1"):
        zerofn.progress([], initial=-1)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True])
def test_every_must_be_a_number_of_steps(wrong):
    with pytest.raises(ValueError, match="every must be a whole number of steps of 1 or more"):
        zerofn.progress([], every=wrong)


def test_what_cannot_be_is_a_sentence(monkeypatch):
    with pytest.raises(ValueError, match="to='log.txt' is not known; expected a path that ends in .jsonl"):
        zerofn.progress([], to="log.txt")
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ImportError, match="trackio is not installed: pip install trackio"):
        zerofn.progress([], to="trackio")
    with pytest.raises(TypeError, match="got tuple. Write state, metrics = step"):
        zerofn.progress([]).log((1, 2))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_the_line_is_written_over(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    line = Line()
    line.show("longer")
    line.show("short")
    line.end()
    assert out.getvalue() == "\rlonger\rshort \n"


class Kernel:
    """A shell of a notebook."""

    kernel = None


def test_in_a_notebook_the_line_is_a_bar(monkeypatch):
    shown = []
    display = types.SimpleNamespace(update=shown.append)
    monkeypatch.setattr("IPython.get_ipython", Kernel)
    monkeypatch.setattr("IPython.display.display", lambda x, display_id: shown.append(x) or display)
    for k, _ in enumerate(bar := zerofn.progress(BATCHES, every=3)):
        bar.log({"loss": k})
    first, second, last = shown
    assert repr(first).startswith("3/7  loss 2") and "3/7  loss 2" in first._repr_html_()
    assert [x._repr_html_().count("progressbar") for x in shown] == [1, 1, 1]
    assert "width:42.9%" in first._repr_html_() and "width:100.0%" in last._repr_html_()
    shown.clear()
    for _ in zerofn.progress(iter(BATCHES), every=3):
        pass
    assert repr(shown[0]).startswith("3  ") and "progressbar" not in shown[0]._repr_html_()


def test_what_is_printed_takes_the_lines_place(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    bar = zerofn.progress(BATCHES[:2], every=1)
    for k, _ in enumerate(bar):
        if k:
            bar.print("validation", 1.5)
    first, printed, last = screen.getvalue().split("\r")[1], *screen.getvalue().split("\r")[2:][1:]
    assert first.startswith("1/2") and printed == "validation 1.5\n" and last.startswith("2/2") and last[-1] == "\n"


def test_leaves_and_numbers():
    assert list(leaves({"a": [1, (2,)], "b": 3})) == [1, 2, 3]
    assert [number(x) for x in (1, 2.5, torch.tensor([3]), torch.ones(2), "x", None)] == [1, 2.5, 3, None, None, None]


def test_json_lines_are_json(tmp_path):
    """JSON has no NaN: a reader that keeps to it refuses the whole line."""

    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    sink = JsonLines(tmp_path / "log.jsonl")
    sink.write({"step": 3, "loss": float("nan"), "scale": float("inf"), "low": -float("inf"), "rate": 0.5})
    sink.close()
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=refuse)
    assert found == {"step": 3, "loss": "NaN", "scale": "Infinity", "low": "-Infinity", "rate": 0.5}
    assert float(found["scale"]) == float("inf")


class Step:
    flops = 3_000_000_000


def test_operations_a_second(clocked, monkeypatch, capsys):
    monkeypatch.setattr(zerofn, "peak_flops", lambda: 1e12, raising=False)
    bar = zerofn.progress(BATCHES[:4], every=2, step=Step())
    list(bar)
    assert [(x["tflops"], x["mfu"]) for x in bar.records] == [(0.012, 0.012)] * 2
    assert "0.012 TFLOP/s (MFU 1.2%)" in capsys.readouterr().err
    monkeypatch.setattr(zerofn, "peak_flops", lambda: None, raising=False)
    bar = zerofn.progress(BATCHES[:2], every=2, step=zerofn.compile(lambda state, x: state))
    list(bar)
    assert "tflops" not in bar.records[0]
    with pytest.raises(TypeError, match="step= must be the step that zerofn.compile returned, got int"):
        zerofn.progress(BATCHES, step=3)
