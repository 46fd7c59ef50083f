"""Static buffers: what is there at one time lies apart, the peak is no higher, and values are what they were."""

import gc
import random

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.fx import Graph

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    adapted_loss_of,
    batch_of,
    build,
    captures_of,
    fake_ranks,
    scheduled,
    state_of,
    step_with,
    train_step_of,
    trained,
    unit_of,
)
from zerofn import optim, passes, tree
from zerofn.capture.capture import capture
from zerofn.graph.alias import positions, roots, touches
from zerofn.graph.liveness import moments
from zerofn.graph.nested import graphs_of
from zerofn.graph.node_kinds import is_gather, is_scatter
from zerofn.graph.resident import resident
from zerofn.memory import arena as arenas
from zerofn.memory.arena import Arenas
from zerofn.passes._packing import Lifetime, pack
from zerofn.passes.assign_buffers import MORE, assign_buffers
from zerofn.util.process import the

ops = torch.ops.zerofn
DEEP = 24
NORMED = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))


def without_buffers(known):
    return [each for each in known if each.fn is not assign_buffers]


def placed(graph):
    """(place, first node, last node, bytes) of all that has one."""
    where, root = positions(graph), roots(graph)
    touched = touches(graph, root)
    for node, at in where.items():
        place = node.args[3] if node.target is ops.bucket.default else node.kwargs.get("place")
        if place:
            yield place, at, where[touched[node][-1]], node.meta["val"].nbytes


@pytest.mark.part(stage=[3], num_microbatches=[2])
@pytest.mark.quick(stage=[3])
@pytest.mark.parametrize(("stage", "num_microbatches"), [(0, 1), (1, 1), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_what_is_there_at_one_time_lies_apart(stage, num_microbatches):
    module = build(DEEP, dropout=0.1)
    with fake_ranks(2):
        state = state_of(module, stage, NORMED, precision="bf16")
        program = scheduled(train_step_of(module, num_microbatches), state, batch_of(rows=256), donating=True)
    graphs = [gm.graph for gm in graphs_of(program.gm)]
    assert program.buffers
    for graph in graphs:
        found = list(placed(graph))
        assert len({place[0] for place, *_ in found}) <= 1
        for k, (a, start, stop, nbytes) in enumerate(found):
            assert a[1] % 512 == 0
            assert a[1] + nbytes <= program.buffers[a[0]].nbytes
            for b, first, last, size in found[k + 1 :]:
                together = first <= stop and start <= last
                assert not together or a[1] + nbytes <= b[1] or b[1] + size <= a[1]
    if stage == 3:
        assert all(n.kwargs.get("place") for graph in graphs for n in graph.nodes if is_gather(n))


def peak(program):
    return max(sum(live.values()) for _, live in moments(program.gm, resident(program).device))


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", range(4))
def test_the_peak_is_hardly_higher(stage):
    """And what is reserved but not in use is told, at every moment."""
    module = build(DEEP)
    found = {}
    for edit in (None, without_buffers):
        with fake_ranks(2):
            program = capture(train_step_of(module), state_of(module, stage, NORMED), batch_of(rows=512))
            passes.pipeline(donating=True, edits=[edit] if edit else []).run(program)
        found[edit] = program
    with_rings, without = found.values()
    assert with_rings.buffers and not without.buffers
    assert peak(without) <= peak(with_rings) <= (1 + MORE) * peak(without)
    reserved = sum(x.nbytes for x in with_rings.buffers)
    over_time = list(moments(with_rings.gm, resident(with_rings).device))
    assert over_time[0].live["reserved"] == over_time[-1].live["reserved"] == resident(with_rings).device["reserved"]
    assert 0 <= min(x.live["reserved"] for x in over_time) < 0.1 * reserved


class Uneven(torch.nn.Module):
    """A large unit, whose gradient comes last, when all activations are gone."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Embedding(16384, 32)
        self.b, self.c, self.d, self.e = (torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        x = self.a(x)
        for layer in (self.b, self.c, self.d, self.e):
            x = layer(x).tanh()
        return x.square().mean()


def test_a_buffer_that_would_raise_the_peak_is_left_out():
    module = Uneven()
    train_step = step_with(lambda p, x: functional_call(module, p, (x,)))

    with fake_ranks(2):
        plain = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=NORMED)
        state = zerofn.shard(plain, stage=2, unit=unit_of)
        program = scheduled(train_step, state, torch.zeros(512, 16, dtype=torch.long), donating=True)
    sent = {n.args[3]: n.args[0].target is ops.bucket.default for n in program.gm.graph.nodes if is_scatter(n)}
    assert sent == {"a": False, "b": True, "c": True, "d": True, "e": True}


def losses_and_parameters(stage, num_microbatches, edit):
    how = {"stage": stage, "num_microbatches": num_microbatches, "precision": "bf16"}
    return trained(6, 16, NORMED, 3, **how, passes=edit)[1]


@pytest.mark.part(size=[2], stage=[3])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_values_stay(ranks, size, stage):
    found = [ranks(size, losses_and_parameters, stage, 2, edit) for edit in (None, without_buffers)]
    for ours, plain in zip(*found, strict=True):
        assert_same_trees(ours, plain)


def adapted(edit):
    module, made = build(6), []
    train_step = step_with(adapted_loss_of(module), 2)

    state, step = state_of(module, 3), zerofn.compile(train_step, passes=edit)
    for seed in range(2):
        state, loss = step(state, batch_of(dist.get_rank(), rows=8, seed=seed))
        made.append(loss)
    return [*made, *tree.leaves(zerofn.unshard(state.params))]


def test_loops_in_loops(ranks):
    for ours, plain in zip(ranks(2, adapted, None), ranks(2, adapted, without_buffers), strict=True):
        assert_same_trees(ours, plain)


def returned():
    """What a step returned of a gathered unit, and what it was then."""
    module = build(6)

    def train_step(state, batch):
        whole = zerofn.gather(state.params)
        loss, grads = state.value_and_grad(lambda p, x: functional_call(module, p, (x,)).square().mean())(batch["x"])
        return state.apply_gradients(grads), {"whole": whole, "loss": loss}

    state, step, found = state_of(module, 3), zerofn.compile(train_step), []
    for seed in range(3):
        before = zerofn.unshard(state.params)
        state, aux = step(state, batch_of(dist.get_rank(), seed=seed))
        found.append((before, aux["whole"]))
    for k, (before, whole) in enumerate(found):
        assert_same_trees(whole, before, f"step {k}")


def test_what_leaves_the_step_is_not_written_over(ranks):
    ranks(2, returned)


def shared():
    """Arenas of steps that run one after the other, small ones first."""
    steps = []
    for num_layers in (DEEP, DEEP + 8):
        module = build(num_layers)
        state, step = state_of(module, 3), zerofn.compile(train_step_of(module))
        steps.append((state, step))
    losses = []
    for _ in range(2):
        for k, (state, step) in enumerate(steps):
            state, aux = step(state, batch_of(dist.get_rank()))
            steps[k] = state, step
            losses.append(aux["loss"])
    entries = [entry for _, step in steps for entry in captures_of(step)]
    memory = {arena._memory.data_ptr() for entry in entries for arena in entry.buffers.arenas}
    return len(entries), len(memory), bool(losses[0] > losses[2]), bool(losses[1] > losses[3])


def test_steps_share_memory(ranks):
    assert ranks(2, shared) == [(2, 1, True, True)] * 2


def beside_a_larger_one(budget):
    """Bytes of the arena while a step with a budget runs after one that needs more."""
    module, batch = build(DEEP), batch_of(rows=1024)
    state, bound = state_of(module, 3, precision="bf16"), zerofn.compile(train_step_of(module), memory=budget)
    reserved = bound.lower(state, batch).memory().static_buffers
    state, _ = bound(state, batch)
    (arena,) = {arena for entry in captures_of(bound) for arena in entry.buffers.arenas}
    zerofn.compile(train_step_of(module), memory=budget)(state_of(module, 3), batch)  # its units take twice as much
    before = arena.nbytes
    bound(state, batch)
    return before > arena.nbytes == reserved > 0


def only_planned():
    """Whether steps that were lowered plan static buffers, without a budget and with one, and whether none was made."""
    gc.collect()  # buffers of the tests before
    before = {place: arena.nbytes for place, arena in the(Arenas).shared.items()}
    module, batch = build(DEEP), batch_of(rows=1024)
    state, steps = state_of(module, 3), [zerofn.compile(train_step_of(module), memory=m) for m in (None, "1GB")]
    plans = [step.lower(state, batch) for step in steps]
    made = {place: arena.nbytes for place, arena in the(Arenas).shared.items()} != before
    return [plan.memory().static_buffers > 0 for plan in plans], made


@pytest.mark.whole
def test_plans_allocate_nothing(ranks):
    assert ranks(2, only_planned) == [([True, True], False)] * 2


def within_budgets():
    """(budget, peak, what is reserved of it) at some budgets."""
    module, batch, found = build(DEEP // 2), batch_of(rows=1024), []

    def planned(budget):
        memory = zerofn.compile(train_step_of(module), memory=budget).lower(state_of(module, 3), batch).memory()
        return memory.total, memory.static_buffers

    most, _ = planned("1GB")
    for share in (100, 95, 90):
        found.append((most * share // 100, *planned(most * share // 100)))
    return found


def test_budgets_leave_room_for_static_buffers(ranks):
    for found in ranks(2, within_budgets):
        assert all(peak <= budget and reserved > 0 for budget, peak, reserved in found), found


def in_turn(with_budgets):
    """Losses of a step with a budget, of which static buffers take little, and one without, of which they take more."""
    module, batch, losses = build(DEEP), batch_of(dist.get_rank(), rows=256), []
    steps = [
        zerofn.compile(train_step_of(module), memory="1GB" if with_budgets else None),
        zerofn.compile(train_step_of(module)),
    ]
    states = [state_of(module, 2), state_of(module, 3)]
    for _ in range(2):
        for k, step in enumerate(steps):
            states[k], aux = step(states[k], batch)
            losses.append(aux["loss"].item())
    return losses


@pytest.mark.whole
def test_steps_with_and_without_budgets_take_turns(ranks):
    assert ranks(2, in_turn, True) == ranks(2, in_turn, False)


@pytest.mark.whole  # test_budgets_leave_room_for_static_buffers has budgets, test_steps_share_memory two steps
def test_a_budget_is_not_broken_by_what_another_step_reserves(ranks):
    assert ranks(2, beside_a_larger_one, "1GB") == [True, True]


def test_memory_grows_and_is_made_anew_after_a_failure():
    arena = arenas.Arena(1000, torch.device("cpu"))
    arenas.empty(10, torch.float32, torch.device("cpu"), [arena.number, 512]).fill_(1.0)
    assert arenas.memory_at([arena.number, 512], 40).view(torch.float32).tolist() == [1.0] * 10
    first = arena.part(0, 1).data_ptr()
    arena.resize(900)
    assert arena.part(0, 1).data_ptr() == first
    arena.resize(1 << 20)
    assert arena.nbytes == 1 << 20 and arena.part((1 << 20) - 1, 1).numel() == 1
    assert arenas.empty(3, torch.bfloat16, torch.device("cpu"), []).numel() == 3
    with pytest.raises(AssertionError):
        arena.part(1 << 20, 1)
    old = arena.part(0, 1)  # others may still write there
    arena.renew()
    assert arena.part(0, 1).data_ptr() != old.data_ptr()


@pytest.mark.parametrize("nbytes", [4096, 5 << 20])
def test_no_more_memory_is_taken_than_plans_count(nbytes):
    arena = arenas.Arena(nbytes, torch.device("cpu"))
    assert arena.part(0, 1).untyped_storage().nbytes() == arena.nbytes == nbytes


def test_packing_keeps_apart_what_is_there_at_one_time():
    random.seed(0)
    node = Graph().placeholder("x")
    for _ in range(200):
        spans = [
            Lifetime(node, start, start + random.randrange(8), random.randrange(1, 9) * 512)
            for start in (random.randrange(40) for _ in range(20))
        ]
        places, nbytes = pack(spans)
        pairs = list(zip(spans, places, strict=True))
        for k, (a, at) in enumerate(pairs):
            for b, there in pairs[k + 1 :]:
                if a.start <= b.stop and b.start <= a.stop:
                    assert at + a.nbytes <= there or there + b.nbytes <= at
        most = max(sum(x.nbytes for x in spans if x.start <= k <= x.stop) for k in range(48))
        assert most <= nbytes <= 2 * most
    assert pack([]) == ([], 0)
