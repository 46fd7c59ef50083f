"""What becomes text in a step is told when the step is captured, and our own messages are not."""

import json
import logging
import math
import sys

import pytest
import torch

import zerofn
from tests.support.small_steps import batch_of, build, loss_of, state_of

MODULE = build(2)
LOG = logging.getLogger("a user's")
TOLD = "while the step is captured. It has no value yet"


def told_lines(caplog):
    """The lines of this file that warnings name, in order."""
    places = [x.message.split(": ")[0] for x in caplog.records if TOLD in x.message]
    assert all(place.startswith(f"{__file__}:") for place in places), places
    return [int(place.rpartition(":")[2]) for place in places]


def test_a_print_is_told_with_its_line(caplog, capsys):
    def step(state, batch):
        loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
        for _ in range(3):
            print("loss", loss)
        return state.apply_gradients(grads), loss

    run, state = zerofn.compile(step), state_of(MODULE, 3)
    with caplog.at_level(logging.WARNING, "zerofn"):
        for _ in range(2):
            state, _ = run(state, batch_of())
    (told,) = (x.message for x in caplog.records if TOLD in x.message)
    assert told.startswith(f"{__file__}:") and "Return it in the metrics, and print it after the step" in told
    assert capsys.readouterr().out.count("loss") == 3
    original = torch._tensor_str._str
    assert original.__module__ == "torch._tensor_str"


def bar(**numbers):
    """Write numbers as progress bars do."""
    return ", ".join(f"{name}={x:.3g}" for name, x in numbers.items())


WAYS = {
    "item": (lambda x: f"{x.item()}", "<no value yet>"),
    "repr of an item": (lambda x: f"{x.item()!r}", "<no value yet>"),
    "format of an item": (lambda x: f"{x.item():.3f}", "<no value yet>"),
    "format of a tensor": (lambda x: f"{x:>8.3f}", "<no value yet>"),
    "a tensor's text": (lambda x: f"{x}", "FakeTensor(..., size=())"),
    "str": (lambda x: str(x.item()), "<no value yet>"),
    "str.format": (lambda x: "{:5d}".format(x.long().item()), "<no value yet>"),  # noqa: UP032
    "round": (lambda x: str(round(x.item(), 3)), "<no value yet>"),
    "arithmetic": (lambda x: f"{2 * x.item() + 1:.1f}", "<no value yet>"),
    "a comparison": (lambda x: str((x > 1).item()), "<no value yet>"),
    "list": (lambda x: str(torch.stack([x, x]).tolist()), "[<no value yet>, <no value yet>]"),
    "percent": (lambda x: "%.3f %d" % (x.item(), x.long().item()), "nan 0"),  # noqa: UP031
    "percent of a tensor": (lambda x: "%.3f" % x, "nan"),  # noqa: UP031
    "json": (lambda x: json.dumps({"loss": x.item()}), '{"loss": "<no value yet>"}'),
    "bar": (lambda x: bar(loss=x.item()), "loss=<no value yet>"),
    "log": (lambda x: LOG.warning("loss %s", x.item()), None),
    "log of a format": (lambda x: LOG.warning("loss %.3f", x.item()), None),
    "log of a tensor": (lambda x: LOG.warning("loss %s", x), None),
}
if sys.version_info >= (3, 11):  # where code has positions
    WAYS |= {
        "float": (lambda x: f"{float(x):.3f}", "nan"),
        "int": (lambda x: f"{int(x)}", "0"),
        "a function of the number": (lambda x: f"{math.exp(x.item()):.2f}", "nan"),
    }


def test_each_way_to_make_text_of_a_value_is_told_with_the_users_line(caplog):
    texts = {}

    def step(state, batch):
        loss = loss_of(MODULE)(zerofn.gather(state.params), batch)
        texts.update((name, way(loss)) for name, (way, _) in WAYS.items())
        return loss

    with caplog.at_level(logging.WARNING):
        zerofn.compile(step)(state_of(MODULE, 3), batch_of())
    assert texts == {name: text for name, (_, text) in WAYS.items()}
    lines = told_lines(caplog)
    assert set(lines) - {bar.__code__.co_firstlineno + 2} == {
        way.__code__.co_firstlineno for name, (way, _) in WAYS.items() if name != "bar"
    }
    assert len(lines) == len(set(lines)), "a line is told twice"
    logged = [x.message for x in caplog.records if x.name == LOG.name]
    assert logged == ["loss <no value yet>", "loss nan", "loss FakeTensor(..., size=())"]
    assert "__float__" not in vars(torch.Tensor), "nothing is left replaced"


@pytest.mark.whole
def test_a_number_that_is_more_than_text_has_to_be_known():
    kept = []
    uses = (
        float,
        math.exp,
        lambda x: [f"{x}", float(x)],
        lambda x: 1.0 if float(x) > 3 else 2.0,
        lambda x: f"{(y := float(x)):.3f}" and y,
        lambda x: print(kept.append(float(x))),
    )
    for use in uses:
        with pytest.raises(zerofn.CaptureError, match="asks for the value of a tensor.*return it in the metrics"):
            zerofn.compile(lambda state, batch, use=use: use(batch["x"].sum()))(state_of(MODULE, 3), batch_of())


def test_nothing_is_told_of_a_step_that_prints_nothing(caplog):
    with caplog.at_level(logging.WARNING, "zerofn"):
        zerofn.compile(lambda state, batch: (state, f"{len(batch['x'])}" and batch["x"].sum()))(
            state_of(MODULE, 3), batch_of()
        )
    assert not caplog.records
