"""The passes together: what they move over the wire, that each leaves a sound graph, and what they write down."""

from collections import Counter

import pytest
import torch

from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captured, fake_ranks, ops, scheduled, state_of, train_step_of
from tests.support.some import some_of
from zerofn.capture.capture import capture
from zerofn.graph.nested import calls, graphs_of
from zerofn.graph.node_kinds import is_gather, is_scatter
from zerofn.passes import run, standard

NUM_RANKS = 4


def sent(gm, times=1):
    """Unit -> elements that its transfers bring to one rank, or take from it, in full units."""
    total = Counter()
    for node in gm.graph.nodes:
        if is_gather(node):
            total[node.args[3]] += times * node.args[0].meta["val"].numel() * NUM_RANKS
        elif is_scatter(node):
            total[node.args[3]] += times * node.args[0].meta["val"].numel()
        elif node.target is ops.all_gather_into_.default:
            total[node.args[4]] += times * node.args[0].meta["val"].numel()
    for _, call in calls(gm):
        total += sent(call.body, times * call.rounds)
    return total


def per_element(stage, num_microbatches, **options):
    """Unit -> transfers of each of its elements, each of which takes (N-1)/N of it over the wire."""
    module = build(6)
    with fake_ranks(NUM_RANKS):
        state = state_of(module, stage, **options)
        step = train_step_of(module, num_microbatches)
        program = scheduled(step, state, batch_of(), donating=True)
        sizes = {u.name: u.size for u in state.params.layout.units}
    return {name: total / sizes[name] for name, total in sent(program.gm).items()}


@pytest.mark.part(n=[2], options=[{}])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}])
def test_communicated_elements(n, options):
    units = ["0", "3", "6", "9", "12", "15"]
    assert per_element(0, n, **options) == dict.fromkeys(units, 2)  # all-reduce: a reduce-scatter and an all-gather
    assert per_element(1, n, **options) == dict.fromkeys(units, 2)
    assert per_element(2, n, **options) == dict.fromkeys(units, 1 + n)
    # The first layer has no region in the backward pass, the last three have one for both.
    two_regions, one_region = dict.fromkeys(["3", "6"], 3 * n), dict.fromkeys(["0", "9", "12", "15"], 2 * n)
    assert per_element(3, n, **options) == two_regions | one_region


def test_frozen_units_are_gathered_and_never_scattered():
    module = build(6)
    with fake_ranks(NUM_RANKS):
        state = state_of(module, 3, frozen=lambda name: name.startswith("3."))
        program = scheduled(train_step_of(module), state, batch_of(), donating=True)
    transfers = [n.args[3] for n in program.gm.graph.nodes if is_scatter(n)]
    assert "3" not in transfers and len(transfers) == 5
    assert sum(is_gather(n) and n.args[3] == "3" for n in program.gm.graph.nodes) == 2


@pytest.mark.part(n=[2], stage=[3])
@pytest.mark.part(n=[1], stage=[1])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("n", [1, 2])
def test_every_pass_leaves_a_sound_graph(stage, n):
    module = build(dropout=0.1)
    with fake_ranks(2):
        program = captured(train_step_of(module, n), state_of(module, stage, precision="bf16"), batch_of())
        for each in standard(donating=True):
            assert not any(each(program))
            for gm in graphs_of(program.gm):
                gm.graph.lint()
            compile(program.gm.code, "graph", "exec")


def test_the_graph_after_each_pass_is_written_down(tmp_path, monkeypatch):
    folder, mine = tmp_path / "dump", tmp_path / "mine.py"
    folder.mkdir()
    mine.write_text("mine")
    (folder / "train_step.00.capture.rank0.py").symlink_to(mine)  # which somebody else has put there
    monkeypatch.setenv("ZEROFN_DUMP", str(folder))
    monkeypatch.setenv("RANK", "0")
    module = build(2)
    program = capture(train_step_of(module, 2), state_of(module, 3), batch_of())
    program.name = "train_step"
    run(program, donating=True)
    names = ["capture", *(each.name for each in standard(donating=True))]
    assert mine.read_text() == "mine"
    assert sorted(p.name for p in folder.iterdir()) == [
        f"train_step.{k:02}.{name}.rank0.py" for k, name in enumerate(names)
    ]
    first, last = ((folder / f"train_step.{k:02}.{names[k]}.rank0.py").read_text() for k in (0, len(names) - 1))
    assert "repeat" in first and "zerofn.as_shard" in first and "addmm" in first  # the loop's body as well
    assert "adamw_" in last and len(last) < len(first)
    assert set(program.timings) == set(names[1:]) and all(t >= 0 for t in program.timings.values())


def test_stages_compute_the_same_sums(ranks):
    """What is sent differs, what comes out does not."""
    first, *others = [ranks(2, _three_steps, stage) for stage in some_of(range(4), 0, 1, 3)]
    for other in others:
        for ours, theirs in zip(other, first, strict=True):
            assert_same_trees(ours, theirs)


def _three_steps(stage):
    import zerofn

    module = build(dropout=0.2)
    state, step = state_of(module, stage), zerofn.compile(train_step_of(module))
    losses = []
    for k in range(3):
        state, aux = step(state, batch_of(torch.distributed.get_rank(), seed=k))
        losses.append(aux["loss"])
    return [*losses, *zerofn.unshard(state.params).values()]
