"""Activations that wait in host memory: the same bits, and on the device what is away takes nothing.

On a fake machine "cpu" stands for the device, and "meta" for its host; or what is run has both in one place.
"""

import contextlib
import re
import types

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support import tiny_models
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    WIDTH,
    batch_of,
    build,
    state_of,
    step_with,
    take_seconds,
    train_step_of,
    trained,
    unit_of,
)
from zerofn import optim, passes, tree
from zerofn.capture.checked_capture import captured
from zerofn.comm import transport
from zerofn.comm.axes import DATA
from zerofn.comm.mesh import Axis, Mesh
from zerofn.cost import simulator
from zerofn.cost.op_cost import DOWN, UP
from zerofn.dry_run.fake_machine import FakeMachine
from zerofn.graph.alias import positions, roots, touches
from zerofn.graph.nested import graphs_of
from zerofn.graph.node_kinds import wait_of
from zerofn.graph.phase import BACKWARD, phase_of
from zerofn.graph.segments import Segments
from zerofn.offload import copy_engine, host_tensor
from zerofn.passes.budget import drops
from zerofn.passes.budget.decision import Choice, as_text, from_text
from zerofn.passes.budget.eviction import Drop, cheapest
from zerofn.passes.budget.search import graphs
from zerofn.passes.offload_activations import UNDER_WAY, stays
from zerofn.planning.plan import Plan
from zerofn.sharding.partition import Partition
from zerofn.sharding.precision import Precision
from zerofn.sharding.shard import initial, shard_fake

ops = torch.ops.zerofn
LAYERS, ROWS = 8, 1 << 16
ACTIVATION = ROWS * WIDTH * 4
LINK = FakeMachine(True, 1e11, 1e10)
PIPELINE = passes.pipeline(donating=True)


def prepared(num_microbatches=1):
    """The everyday step beside a fake device."""
    torch.manual_seed(0)
    layers = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.GELU()) for _ in range(LAYERS)]
    module = torch.nn.Sequential(*(x for layer in layers for x in layer))

    def init():
        return zerofn.TrainState.create(params=dict(module.named_parameters()), tx=optim.adamw(1e-2))

    state = shard_fake(initial(init, Precision()), Partition.zero(Mesh((Axis(DATA, 1, 0, "fake machine"),))), unit_of)
    batch = {k: LINK.zeros((ROWS * num_microbatches, WIDTH), torch.float32, torch.device("cpu")) for k in "xy"}
    program, _ = captured(train_step_of(module, num_microbatches), state, batch)
    PIPELINE.prepare(program)
    return program


def planned(choose, num_microbatches=1):
    """(plan, what each graph does). `choose`: a prepared program -> choices."""
    with LINK():
        program = prepared(num_microbatches)
        choices = choose(program)
        PIPELINE.finish(program, choices=choices)
        return Plan(program, None, LINK), choices


def keep(program):
    return [Choice() for _ in graphs(program.gm)]


def all_away(program):
    return [Choice(offloaded=frozenset(x.memory.name for x in stays(gm.graph))) for gm in graphs(program.gm)]


def kept(plan):
    return max(x.live["activations"] for x in plan.memory().over_time)


def moves(gm):
    """[(to the host, back)], in order of leaving."""
    pairs = []
    for node in gm.graph.nodes:
        if node.target is ops.bring.default and node.args[1].type == "meta":
            (back,) = wait_of(node).users
            assert back.target is ops.bring.default and back.args[1].type == "cpu"
            pairs.append((node, back))
    return pairs


@pytest.mark.part(num_microbatches=[2])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_activations_on_the_host_take_no_device_memory(num_microbatches):
    plain, _ = planned(keep, num_microbatches)
    plan, choices = planned(all_away, num_microbatches)
    nbytes = sum(len(choice.offloaded) for choice in choices) * ACTIVATION
    assert kept(plain) == nbytes == plan.memory().host >= LAYERS * ACTIVATION
    assert ACTIVATION <= kept(plan) <= (UNDER_WAY + 1) * ACTIVATION
    assert not any(x.live["staging"] for x in plan.memory().over_time)  # what is back is an activation again
    assert plain.memory().total - plan.memory().total >= (LAYERS - 2 * UNDER_WAY - 2) * ACTIVATION
    moved = {how: sum(x.nbytes * n for x, n in plan.transfers().items() if x.how == how) for how in (UP, DOWN)}
    assert moved == {UP: num_microbatches * nbytes, DOWN: num_microbatches * nbytes}
    assert not plain.memory().host and not plain.transfers()


def test_on_the_host_is_counted_what_is_there_at_once():
    """A step that goes forward and back twice has the host's memory twice."""
    two = planned(all_away, 2)[0]
    body = graphs_of(two.graph)[1]
    assert len(moves(body)) * ACTIVATION == two.memory().host
    first, *_ = moves(body)
    last = touches(body.graph, roots(body.graph))[first[0]][-1]
    assert last is wait_of(first[1])  # until what is there was read


def test_transfers_are_ahead_of_their_use_but_no_more_than_two_at_a_time():
    """The link is far slower than these small products."""
    plan, _ = planned(all_away)
    where, touched = positions(plan.graph.graph), touches(plan.graph.graph, roots(plan.graph.graph))
    pairs = moves(plan.graph)
    assert len(pairs) > 2 * UNDER_WAY
    leaving = [(where[a], where[wait_of(a)]) for a, _ in pairs]
    early = [(where[b], where[wait_of(b)]) for _, b in pairs]
    for spans in (leaving, early):
        num = [sum(start <= at < stop for start, stop in spans) for at, _ in spans]
        assert max(num) == UNDER_WAY, num
    for (a, b), (_, left), (start, there) in zip(pairs, leaving, early, strict=True):
        assert left < start < there
        assert touched[b][-1].meta["phase"] == "backward" and phase_of(b) == BACKWARD != phase_of(a)


def test_where_computing_takes_long_nothing_is_back_before_it_is_needed(monkeypatch):
    take_seconds(monkeypatch, lambda node: 1.0)
    plan, _ = planned(all_away)
    nodes = positions(plan.graph.graph)
    assert all(nodes[wait_of(x)] - nodes[x] <= 2 for pair in moves(plan.graph) for x in pair)


# --- the values --------------------------------------------------------------------------------------------------


def offload_all(monkeypatch, drop=False):
    """Let a budget choose to offload everything; with `drop`, every other one is computed again."""
    told = []

    def decide(self, program, **options):
        found = [[x.memory.name for x in stays(gm.graph)] for gm in graphs(program.gm)]
        again = [{x.name for x in Segments(gm.graph).activations} for gm in graphs(program.gm)]
        names = [
            frozenset(n for k, n in enumerate(x) if drop and k % 2 and n in y)
            for x, y in zip(found, again, strict=True)
        ]
        told.append(sum(map(len, found)) - sum(map(len, names)))
        return [Choice(offloaded=frozenset(x) - y, dropped=y) for x, y in zip(found, names, strict=True)]

    monkeypatch.setattr(passes.Pipeline, "decide", decide)
    return told


def num_back(plan):
    gms = graphs_of(plan.graph)
    return sum(n.target is ops.bring.default and phase_of(n) == BACKWARD for gm in gms for n in gm.graph.nodes)


@pytest.mark.part(num_microbatches=[1], drop=[True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_steps_with_offloaded_activations_have_the_same_bits(monkeypatch, num_microbatches, drop):
    """With dropout; and where others are computed again, from what comes back."""
    options = {"num_microbatches": num_microbatches, "memory": "1TB"}
    _, expected = trained(6, 64, optim.adamw(1e-2), 3, **options)
    told = offload_all(monkeypatch, drop)
    plan, found = trained(6, 64, optim.adamw(1e-2), 3, **options)
    assert_same_trees(found, expected)
    assert num_back(plan) == told[0] > 5 or drop and num_back(plan) > 2


@pytest.mark.whole
@pytest.mark.part(name=["gpt2"])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_models(monkeypatch, name):
    """Whose backward passes read views of what was kept."""

    def one_step():
        torch.manual_seed(0)
        model, inputs = tiny_models.BUILDERS[name]().train(), tiny_models.batch(name)
        train_step = step_with(lambda p, x: functional_call(model, p, (), x).logits.float().square().mean())

        plain = zerofn.TrainState.create(params=dict(model.named_parameters()), tx=optim.adamw(1e-2))
        state, step = zerofn.shard(plain), zerofn.compile(train_step, memory="1TB")
        plan = step.lower(state, inputs)
        state, loss = step(state, inputs)
        return plan, [loss, *tree.leaves(zerofn.unshard(state.params))]

    _, expected = one_step()
    told = offload_all(monkeypatch)
    plan, found = one_step()
    assert_same_trees(found, expected)
    assert num_back(plan) == told[0] > 10


def test_what_is_written_or_leaves_the_step_stays():
    def train_step(state, batch):
        def loss_fn(params, batch):
            hidden = batch["x"] @ params["0.weight"]
            shown, written = hidden.sin(), hidden.cos().mul_(2)
            return (shown.square() + written.square()).mean(), shown

        (loss, shown), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)
        return state.apply_gradients(grads), (loss, shown)

    program, _ = captured(train_step, state_of(build(1), 3), batch_of())
    assert [str(x.memory.target) for x in stays(program.gm.graph)] == ["aten.mm.default"]


# --- the budget --------------------------------------------------------------------------------------------------


def within(memory):
    return lambda program: PIPELINE.decide(program, memory=memory, remat=None)


def test_a_budget_takes_what_costs_least(monkeypatch):
    most = planned(keep)[0].memory().total
    plan, (choice,) = planned(within(most * 3 // 4))
    assert choice.dropped and not choice.offloaded  # a hyperbolic tangent is cheaper than its transfer
    assert plan.memory().total <= most * 3 // 4

    real = simulator.roofline
    monkeypatch.setattr(simulator, "roofline", lambda machine: lambda node: 1e3 * real(machine)(node))
    plan, (choice,) = planned(within(most * 3 // 4))
    assert choice.offloaded and not choice.dropped & choice.offloaded
    assert plan.memory().total <= most * 3 // 4 and plan.memory().host >= ACTIVATION


def least():
    with pytest.raises(MemoryError, match="It needs at least") as error:
        planned(within(10))
    return int(re.search(r"at least ([\d,]+) bytes", str(error.value))[1].replace(",", ""))


@pytest.mark.whole
def test_what_layers_begin_with_can_be_away_too(monkeypatch):
    low = least()
    plan, (choice,) = planned(within(low))
    assert choice.offloaded and plan.memory().total <= low
    monkeypatch.setattr(drops, "stays", lambda graph: [])
    assert low < least() - ACTIVATION


def test_in_host_memory_nothing_is_sent_there():
    program, _ = captured(train_step_of(build(4)), state_of(build(4), 3), batch_of(rows=512))
    PIPELINE.prepare(program)
    gm = program.gm
    assert stays(gm.graph) and not list(drops._offloads(gm, program.context.lanes(), positions(gm.graph), [], set()))


def test_one_way_is_enough_for_a_value():
    live = [1, 9, 9, 1]
    again, away = Drop("again", 0, 3, 4, 1.0, "x"), Drop("away", 0, 3, 4, 2.0, "x")
    other = Drop("other", 0, 3, 4, 3.0, "y")
    assert cheapest(live, [away, again], 1) == ([again], 5)
    assert cheapest(live, [away, again, other], 1) == ([again, other], 1)


def test_what_links_take_for_nothing_is_what_is_dearest_to_compute_again(monkeypatch):
    with LINK():
        program = prepared()
        gm, lanes = program.gm, program.context.lanes()
        where = positions(gm.graph)
        again = {x.of: x.seconds for x in drops.activations(lanes, Segments(gm.graph), where)}
        # As much as two activations' transfers take.
        away = 2.5 * lanes.seconds_of(UP, ACTIVATION) / drops.HIDDEN
        num = sum(phase_of(n) == "forward" for n in gm.graph.nodes)
        take_seconds(monkeypatch, lambda node: away / num)
        lanes = program.context.lanes()
        computed = [Drop("", 0, 0, 1, float(k), name) for k, name in enumerate(again)]
        (gone,) = [x.memory for x in stays(gm.graph) if x.memory.name == computed[0].of]
        assert computed[0].of not in {x.of for x in drops._offloads(gm, lanes, where, computed, {gone})}
        found = {x.of: x.seconds for x in drops._offloads(gm, lanes, where, computed, set())}
    cheap = sorted(found, key=found.__getitem__)[:2]
    assert cheap == list(again)[:-3:-1]
    assert max(map(found.get, cheap)) < min(seconds for x, seconds in found.items() if x not in cheap)


def test_choices_are_told_as_texts():
    choices = [Choice(frozenset("ab"), frozenset({("a", "b")}), frozenset(), frozenset("cd")), Choice()]
    assert from_text(as_text(choices)) == choices


# --- on a device -------------------------------------------------------------------------------------------------


class There:
    """A tensor on a device that is not there, or in its host's memory."""

    def __init__(self, told, kind, address):
        self.device, self.told, self.address = torch.device(kind), told, address

    def dim(self):
        return 1

    def data_ptr(self):
        return self.address

    def copy_(self, x, non_blocking):
        self.told.append(("copy", x.device.type, self.device.type, non_blocking))

    def record_stream(self, stream):
        self.told.append(("record",))


class Stream:
    def __init__(self, told, name):
        self.told, self.name = told, name

    def wait_stream(self, other):
        self.told.append((self.name, "after", other.name))

    def wait_event(self, event):
        self.told.append((self.name, "waits for", event.name))

    def record_event(self):
        return types.SimpleNamespace(name=self.name, synchronize=lambda: self.told.append(("host waits",)))


@pytest.mark.parametrize("offloaded", [True, False])
def test_the_host_goes_on_while_activations_leave(monkeypatch, offloaded):
    told, gpu = [], torch.device("cuda")
    monkeypatch.setattr(host_tensor, "like", lambda x, device: There(told, "cpu", id(x)))
    fake = types.SimpleNamespace(
        empty_like=lambda x, device: There(told, device.type, id(x)),
        cuda=types.SimpleNamespace(
            current_stream=lambda device: Stream(told, "device"), stream=lambda stream: contextlib.nullcontext()
        ),
    )
    monkeypatch.setattr(host_tensor, "torch", fake)
    monkeypatch.setattr(copy_engine, "torch", fake)
    monkeypatch.setattr(copy_engine.CopyEngine, "stream", lambda self, device, towards: Stream(told, f"to {towards}"))
    x = There(told, "cuda", 1)
    there = transport.wait_(host_tensor.bring(x, torch.device("cpu"), offloaded=offloaded))
    assert told[-1] == (("device", "waits for", "to cpu") if offloaded else ("host waits",))
    begun = host_tensor.bring(there, gpu, offloaded=offloaded)
    back = transport.wait_(begun)
    assert told[-1] == ("device", "waits for", "to cuda") and back is begun
    copies = [t for t in told if t[0] == "copy"]
    assert copies == [("copy", "cuda", "cpu", True), ("copy", "cpu", "cuda", True)]
    assert told.index(("to cuda", "after", "device")) < told.index(copies[1])  # which has waited for the copy down
    assert ("record",) not in told and (gpu in copy_engine.copies()._reading) != offloaded
    assert (there.data_ptr() in copy_engine.copies().leaving) != offloaded
    copy_engine.copies().leaving.pop(there.data_ptr(), None)
    copy_engine.copies()._reading.clear()
