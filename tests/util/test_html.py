"""What notebooks show of states, shards, plans and profiles."""

import xml.etree.ElementTree as ElementTree

import torch

import zerofn
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from zerofn import optim
from zerofn.util.html import preformatted, table


def texts(shown):
    """The texts of a piece of HTML, which is well-formed, so that a browser changes nothing of it."""
    return [x.strip() for x in ElementTree.fromstring(f"<div>{shown}</div>").itertext() if x.strip()]


def test_a_table():
    shown = table("<title>", ("name", "bytes"), [("a&b", "1"), ("c", "22")], left=(0,), marked=1)
    assert texts(shown) == ["<title>", "name", "bytes", "a&b", "1", "c", "22"]
    assert shown.count("text-align:left") == 4 and shown.count("font-weight:bold") == 1
    assert texts(preformatted("x < y\n  z")) == ["x < y\n  z"]


def state():
    params = {"w": torch.zeros(70_000), "<b>": torch.zeros(3)}
    return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3), frozen=lambda name: name == "<b>")


def test_a_state_shows_its_parts_and_its_shards():
    shown = texts(zerofn.shard(state(), stage=3)._repr_html_())
    assert shown[0] == "TrainState at step 0" and "a table below" in shown and "frozen" in shown
    assert "2 leaves, 70,003 elements in 2 units; stage 3, rank 0 of 1 holds 294,912 bytes" in shown
    assert [x for x in shown if x.startswith("AdamState")] != []
    assert "a table below" not in texts(state()._repr_html_())


def test_shards_that_are_used_up_say_so():
    params = zerofn.shard(state()).params
    params.donate("A step has it.")
    assert texts(params._repr_html_()) == ["Sharded(donated: A step has it.)"]


def test_a_profile_is_tables_and_a_picture():
    step = zerofn.compile(train_step_of(build(2)))
    _, profile = step.profile(state_of(build(2), 3), batch_of())
    shown = texts(profile._repr_html_())
    assert {"by kind", "by unit", "measured", "forward", "backward"} <= set(shown)
    svg = profile._repr_html_().partition("<svg")[2]  # in the page's colours, on light and dark ones
    assert "currentColor" in svg and "#000000" not in svg and "#ffffff" not in svg
