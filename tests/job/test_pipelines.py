"""Ranks of a pipeline of which one fails, ends, freezes or differs: all end, with its message, and the state stays."""

import os
import re
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import linear

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captures_of, layers_on_stages, loss_of, state_of, step_with
from zerofn.comm import channels
from zerofn.comm.mesh import Mesh
from zerofn.graph.messages import message_ends
from zerofn.graph.nested import call_of
from zerofn.graph.node_kinds import set_argument, wait_of
from zerofn.job import agreement, heartbeat
from zerofn.job.in_flight import pending
from zerofn.passes import Pass, after

LAYERS = 4
SECONDS = 10.0


def _raises():
    raise ValueError("the disk is full")


def _ends():
    os.kill(os.getpid(), signal.SIGKILL)


def _freezes():
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


EVENTS = {"raises": _raises, "ends": _ends, "freezes": _freezes}
WHAT = {"now": "nothing"}


@torch.library.custom_op("pipelines::happens", mutates_args=())
def happens(x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
    """`x`; on a rank that something is to happen to, it does where `when` is not zero."""
    if when.item() and WHAT["now"] in EVENTS:
        EVENTS[WHAT["now"]]()
    return x.clone()


@happens.register_fake
def _(x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _loss_of(layers):
    """Something may happen in the forward pass, behind these layers."""

    def loss_fn(params, batch):
        x = batch["x"]
        for k in range(LAYERS):
            x = torch.tanh(linear(x, params[f"{3 * k}.weight"], params[f"{3 * k}.bias"]))
            if k in layers:
                x = x + happens(0 * batch["y"], batch["when"].sum())
        return (x - batch["y"]).square().mean()

    return loss_fn


def _shards(state):
    return zerofn.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


def in_the_midst(size, schedule, event, stage):
    """What a rank raises and after how long, if something happens to rank `stage` in the third of four microbatches."""
    agreement.PATIENCE, heartbeat.PATIENCE, agreement.SILENCE, heartbeat.SECONDS = 60.0, 1.5, 1.5, 0.2
    module, mesh = build(LAYERS), Mesh.make(pipe=2, data=size // 2)
    state = state_of(module, 1, mesh=mesh, cuts=layers_on_stages(LAYERS, 2, schedule))
    step = zerofn.compile(step_with(_loss_of([2 * stage]), 4))

    def batch(when, seed):
        return {**batch_of(mesh.rows.rank, seed=seed), "when": torch.tensor([0.0, 0.0, when, 0.0])}

    for k in range(2):
        state, _ = step(state, batch(1.0, k))
    assert [*message_ends(captures_of(step)[0].program.gm.graph)]
    before, began = _shards(state), time.monotonic()
    if mesh.stages.rank == stage and mesh.rows.rank == 0:
        WHAT["now"] = event
    with pytest.raises((ValueError, RuntimeError)) as e:
        step(state, batch(1.0, 9))
    took = time.monotonic() - began
    assert_same_trees(_shards(state), before)
    return str(e.value), took


CASES = [(2, "1f1b", "raises", 1), (2, "zb-h1", "ends", 0)]
WHOLE = [
    (2, schedule, event, stage)
    for schedule in ("gpipe", "1f1b", "zb-h1")
    for event in EVENTS
    for stage in range(2)
    if (2, schedule, event, stage) not in CASES
] + [(4, "1f1b", event, stage) for event in EVENTS for stage in range(2)]


@pytest.mark.parametrize(
    ("size", "schedule", "event", "stage"), [*CASES, *(pytest.param(*x, marks=pytest.mark.whole) for x in WHOLE)]
)
def test_a_stage_to_which_something_happens(ranks, size, schedule, event, stage):
    found = ranks(size, in_the_midst, size, schedule, event, stage, timeout=60, expect_errors=event == "ends")
    ranks.stop()
    victim = stage * (size // 2)
    words = {"raises": "the disk is full", "ends": "another rank has ended", "freezes": "gave no sign of life"}
    for rank, each in enumerate(found):
        if event == "ends" and rank == victim:
            assert each.type == "Died"
        else:
            said, took = each
            assert words[event] in said or (event == "ends" and "another rank failed" in said), said
            assert took < SECONDS


def without_cut(known):
    return [x for x in known if x.name != "cut_stages"]


def another_edge(program):
    first = next(end for end in message_ends(program.gm.graph) if not end.sends)
    set_argument(first.node, "edge", "x")


def another_order(program):
    first, *_, last = (end.node for end in message_ends(program.gm.graph) if not end.sends)
    first.prepend(last)


def waits_first(program):
    """A rank waits for what it receives as soon as it has begun to, and sends nothing until then."""
    for end in [*message_ends(program.gm.graph)]:
        if not end.sends:
            end.node.append(wait_of(end.node))


DIFFER = {  # what rank 1 has, and what all ranks hear
    "microbatches": ({"n": 2}, r"ranks differ(?s:.)*rank 0: microbatches: 4"),
    "messages": (
        {"options": {"passes": after("cut_stages", Pass(another_edge))}},
        r"stages of the pipeline differ. Rank 0 sends 4 messages to rank 1, which receives 4; the first that differs "
        r"is '.*\.0' \[1, 16\] torch.float32 at the sender and 'x' ",
    ),
    "order": ({"options": {"passes": after("cut_stages", Pass(another_order))}}, "a message between pipeline stages"),
    "waits": ({"options": {"passes": after("cut_stages", Pass(waits_first))}}, "or the wait for one. Ranks could"),
    "schedule": ({"options": {"schedule": "gpipe"}}, r"ranks differ(?s:.)*schedule: gpipe"),
    "its cuts' schedule": ({"schedule": "gpipe"}, "zerofn.shard: ranks differ(?s:.)*by 'gpipe'"),
    "cuts": ({"layers": LAYERS - 1}, "zerofn.shard: ranks differ(?s:.)*on stage 0 of a line of 2 ranks"),
    "passes": ({"options": {"passes": without_cut}}, "ranks differ"),
    "rows": ({"rows": 1}, "must have the same rows, but their batches differ. Ranks along 'pipe'"),
}


def differing(what):
    mine, _ = DIFFER[what] if dist.get_rank() else ({}, "")
    module, mesh = build(LAYERS), Mesh.make(pipe=2)
    cuts = layers_on_stages(LAYERS, 2, mine.get("schedule", "1f1b"))
    if "layers" in mine:
        cuts |= {k: v for k, v in layers_on_stages(2 * LAYERS, 2).items() if k.startswith("6.")}
    with pytest.raises(RuntimeError) as caught:
        state = state_of(module, 1, mesh=mesh, cuts=cuts)
        step = zerofn.compile(step_with(loss_of(module), mine.get("n", 4)), **mine.get("options", {}))
        step(state, batch_of(mine.get("rows", 0)))
    return str(caught.value)


@pytest.mark.part(what=["messages", "order", "rows", "cuts"])
@pytest.mark.parametrize("what", DIFFER)
def test_ranks_of_a_pipeline_that_differ_are_told_so(ranks, what):
    for said in ranks(2, differing, what, timeout=30):
        assert re.search(DIFFER[what][1], said), said


def other_step():
    """One rank evaluates, or takes a step of another batch size, where the other trains."""
    module, mesh = build(LAYERS), Mesh.make(pipe=2)
    state = state_of(module, 1, mesh=mesh, cuts=layers_on_stages(LAYERS, 2))
    step = zerofn.compile(step_with(loss_of(module), 4))
    for rows in (4, 8):
        state, _ = step(state, batch_of(rows=rows))
    before = _shards(state)
    with pytest.raises(RuntimeError) as caught:
        step(state, batch_of(rows=8 if dist.get_rank() else 4))
    assert_same_trees(_shards(state), before)
    return str(caught.value)


def test_a_rank_that_runs_another_step_is_out_of_step(ranks):
    for said in ranks(2, other_step, timeout=30):
        assert "ranks are out of step" in said and "for another signature" in said
    ranks.stop()


def computes_meanwhile(folder):
    """Rank 0 holds a message back until rank 1, which has begun to receive it, has computed something else."""
    mesh, rank = Mesh.make(pipe=2), dist.get_rank()
    state = state_of(build(LAYERS), 1, mesh=mesh, cuts=layers_on_stages(LAYERS, 2, "zbv"))
    step = zerofn.compile(step_with(_loss_of(range(LAYERS)), 4))
    batch = {**batch_of(), "when": torch.ones(4)}
    state, _ = step(state, batch)
    numbers = {node: k for k, node in enumerate(captures_of(step)[0].program.gm.graph.nodes)}
    computing = [k for node, k in numbers.items() if call_of(node) and node.args[0].name.endswith("_f")]
    begun = [end.node for end in message_ends(captures_of(step)[0].program.gm.graph) if not end.sends]
    between = [any(numbers[x] < k < numbers[wait_of(x)] for k in computing) for x in begun]
    held = int(agreement.exchange("which message", str(between.index(True) if rank else ""))[1])
    counted, told, begin = [], folder / "computed", channels._begun

    def hold():
        for _ in range(400):
            if told.exists():
                return
            time.sleep(0.05)
        raise TimeoutError("rank 1 computes nothing while it has not received this")

    def watched(x, peer, group, *, sends):
        if sends != bool(rank):
            counted.append(None)
            if len(counted) == held + 1 and not rank:
                pending().post(hold)
        return begin(x, peer, group, sends=sends)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "_begun", watched)
        patch.setitem(EVENTS, "computes", lambda: len(counted) > held and told.touch())
        patch.setitem(WHAT, "now", "computes" if rank else "nothing")
        _, loss = step(state, batch)
    assert told.exists()
    return loss


def test_a_message_that_has_not_come_keeps_nothing_that_does_not_read_it(ranks, tmp_path):
    one, other = ranks(2, computes_meanwhile, tmp_path, timeout=40)
    assert one == other
