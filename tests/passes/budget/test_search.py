"""Steps that keep to a budget of memory: what is measured is no more, and the bits are those of ample memory."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    adapted_loss_of,
    batch_of,
    build,
    fake_ranks,
    loss_of,
    state_of,
    step_with,
    train_step_of,
    trained,
    unit_of,
)
from zerofn import optim
from zerofn.graph.node_kinds import is_gather
from zerofn.passes.budget import search
from zerofn.passes.budget.eviction import Drop, cheapest

CLIPPED = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))
LAYERS, ROWS = 6, 384  # activations that weigh more than parameters


def at(memory, stage, num_microbatches, precision=None):
    """(peak, bytes sent, losses and parameters) with a budget."""
    plan, found = trained(
        LAYERS, ROWS, CLIPPED, 3, stage=stage, num_microbatches=num_microbatches, precision=precision, memory=memory
    )
    return plan.memory().total, plan.sent, found


def least(run):
    """What a budget that is too small, given to `run`, says would do."""
    with pytest.raises(MemoryError, match="cannot be scheduled within 10 bytes") as error:
        run(10)
    return int(re.findall(r"[\d,]{4,}", str(error.value))[-1].replace(",", ""))


def at_budgets(stage, num_microbatches, precision, parts=2):
    most, sent, expected = at("1TB", stage, num_microbatches, precision)
    low = least(lambda memory: at(memory, stage, num_microbatches, precision))
    assert low < most
    for k in range(parts + 1):
        search = low + (most - low) * k // parts
        peak, now, found = at(search, stage, num_microbatches, precision)
        assert peak <= search
        assert_same_trees(found, expected, str(search))
        assert sent <= now and (k < parts or sent == now)
    return low / most


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.whole
def test_one_rank(num_microbatches):
    assert at_budgets(3, num_microbatches, None, 3) < 0.9


@pytest.mark.whole
@pytest.mark.parametrize("stage, parts", [(0, 2), (2, 2), (3, 2), (3, 1)])
def test_two_ranks(ranks, stage, parts):
    first, second = ranks(2, at_budgets, stage, 1, "bf16", parts)
    assert first == second < 0.9


@pytest.mark.whole
def test_loops_on_two_ranks(ranks):
    ranks(2, at_budgets, 3, 2, None, 1)


def adapted(memory):
    """(peak, loss and parameters) of a step with a loop in a loop."""
    module = build(LAYERS)
    train_step = step_with(adapted_loss_of(module), 2)

    state, step = state_of(module, 3, CLIPPED), zerofn.compile(train_step, memory=memory)
    batch = batch_of(dist.get_rank(), rows=8 * ROWS)
    peak = step.lower(state, batch).memory().total
    state, loss = step(state, batch)
    return peak, [loss, *zerofn.tree.leaves(zerofn.unshard(state.params))]


def adapted_at_budgets():
    most, expected = adapted("1TB")
    low = least(adapted)
    assert low < most
    for memory in (low, (low + most) // 2):
        peak, found = adapted(memory)
        assert peak <= memory
        assert_same_trees(found, expected)


@pytest.mark.whole
def test_loops_in_loops(ranks):
    ranks(2, adapted_at_budgets)


class Uneven(torch.nn.Module):
    """A layer whose leaves ranks hold unlike parts of."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(32, 96), torch.nn.Linear(96, 32)

    def forward(self, x):
        return x + self.narrow(self.wide(x).tanh())


def lowered():
    """(budget, what a model takes) at some budgets."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Uneven() for _ in range(6)))
    train_step = step_with(lambda p, x: functional_call(model, p, (x,)).square().mean())

    def peak(budget):
        plain = zerofn.TrainState.create(params=dict(model.named_parameters()), tx=CLIPPED)
        state = zerofn.shard(plain, unit=lambda name: name.split(".")[0])
        return zerofn.compile(train_step, memory=budget).lower(state, torch.ones(64, 32)).memory().total

    most, low = peak("1TB"), least(peak)
    return [(budget, peak(budget)) for budget in range(low, most, (most - low) // 2)]


def test_ranks_choose_alike(ranks):
    """What is read in the own shard, and how many parts it has, is other on each rank, and so is what it takes."""
    for found in ranks(2, lowered):
        assert all(peak <= search for search, peak in found)


def gathers_with(memory):
    module = build(LAYERS)
    step = zerofn.compile(train_step_of(module), memory=memory)
    plan = step.lower(state_of(module, 3), batch_of(dist.get_rank()))
    return sum(map(is_gather, plan.graph.graph.nodes))


def test_schedules_that_are_tried_make_no_code(monkeypatch):
    """To generate and compile a graph's code after each pass takes longer than all that the passes do."""
    made, python_code = [], torch.fx.Graph.python_code

    def counted(graph, *args, **kwargs):
        made.append(graph)
        return python_code(graph, *args, **kwargs)

    monkeypatch.setattr(torch.fx.Graph, "python_code", counted)
    module = build(LAYERS)
    with pytest.raises(MemoryError):
        zerofn.compile(train_step_of(module), memory=10).lower(state_of(module, 3), batch_of(0))
    assert not made


def test_schedules_that_are_tried_take_no_place_on_drives(tmp_path, monkeypatch):
    """What runs in the end takes it once: gradients that wait do so on the drive."""
    made, store = [], zerofn.offload.disk.store.Store

    def counted(*args, **kwargs):
        made.append(store(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(zerofn.offload.disk.store, "Store", counted)
    module = build(LAYERS)
    state = state_of(module, 3, CLIPPED, offload=zerofn.Offload(optimizer="nvme", path=tmp_path))
    assert len(made) == 1
    low = least(lambda memory: zerofn.compile(train_step_of(module), memory=memory).lower(state, batch_of(rows=ROWS)))
    assert len(made) == 1
    step = zerofn.compile(train_step_of(module), memory=low)
    step.lower(state, batch_of(rows=ROWS))
    assert len(made) == 1  # nor does a plan
    step(state, batch_of(rows=ROWS))
    assert len(made) == 2


def test_the_schedule_that_is_made_was_tried(monkeypatch):
    """The gather of a unit that no loss uses is gone, and its name free where the graph was copied."""
    tried, attempt = [], search._Search._scheduled

    def gathers_of(gms):
        return [[n.name for n in gm.graph.nodes if is_gather(n)] for gm in gms]

    def noted(search, choices):
        found = attempt(search, choices)
        tried.append(gathers_of(x.gm for x in found.graphs))
        return found

    monkeypatch.setattr(search._Search, "_scheduled", noted)
    module = build(LAYERS)
    params = {**dict(module.named_parameters()), "unused.weight": torch.ones(64)}

    def train_step(state, batch):
        def loss_fn(params, batch):
            return loss_of(module)({name: x for name, x in params.items() if name != "unused.weight"}, batch)

        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), 2)(batch)
        return state.apply_gradients(grads), loss

    with fake_ranks(2):
        state = zerofn.shard(zerofn.TrainState.create(params=params, tx=CLIPPED), unit=unit_of)

        def lowered(memory):
            return zerofn.compile(train_step, memory=memory).lower(state, batch_of(rows=ROWS))

        plan = lowered(least(lowered) * 11 // 10)
    assert gathers_of(search.graphs(plan.graph)) in tried


def test_with_ample_memory_every_unit_is_gathered_once(ranks):
    assert ranks(2, gathers_with, "1TB") == [LAYERS, LAYERS]
    assert ranks(2, gathers_with, None)[0] > LAYERS


def test_what_frees_most_for_least_goes_first():
    live = [1, 5, 9, 9, 9, 5, 1]
    near, far, dear = Drop("near", 1, 5, 4, 4.0), Drop("far", 0, 6, 4, 4.0), Drop("dear", 0, 6, 4, 9.0)
    assert cheapest(live, [near, far, dear], 9) == ([], 9)
    assert cheapest(live, [near, dear, far], 5) == ([far], 5)
    assert cheapest(live, [dear, near, far], 1) == ([near, far], 1)
    assert cheapest(live, [near, far], 0) == ([near, far], 1)


def test_what_another_drop_makes_needless_is_kept():
    """The small one goes first, being cheaper by the byte; the large one then does by itself."""
    live = [1, 10, 10, 1]
    small, large = Drop("small", 0, 3, 2, 0.1), Drop("large", 0, 3, 8, 1.0)
    assert cheapest(live, [small, large], 3) == ([large], 2)


@pytest.mark.parametrize(
    ("memory", "error", "message"),
    [
        ("24 apples", ValueError, "compile: memory='24 apples' is not an amount of memory. Write '24GiB'"),
        (0, TypeError, "compile: memory=0 must be a whole number of bytes above 0"),
        (True, TypeError, "compile: memory=True must be a whole number of bytes above 0"),
    ],
)
def test_amounts_that_are_none(memory, error, message):
    with pytest.raises(error, match=message):
        zerofn.compile(lambda state, batch: state, memory=memory)
