import pytest
import torch

import zerofn
from tests.support.small_steps import WIDTH, aten, batch_of, build, captured, fake_ranks, loss_of, ops, state_of
from zerofn.graph.alias import is_view, last_uses, positions, roots, writes, written_before
from zerofn.graph.nested import repeat

PLAIN = {"params": torch.ones(2)}


def graph_of(fn):
    """The graph of `fn(x)` for the batch, as an evaluation."""
    return captured(lambda state, batch: fn(batch["x"]), PLAIN, batch_of()).gm.graph


def only(graph, target):
    (node,) = (n for n in graph.nodes if n.target is target)
    return node


LISTS = {
    "split": lambda x: x.split(8, -1),
    "split_with_sizes": lambda x: x.split([4, 12], -1),
    "chunk": lambda x: x.chunk(2),
    "unbind": lambda x: x.unbind(),
    "tensor_split": lambda x: x.tensor_split(3, -1),
    "unsafe_split": lambda x: torch.unsafe_split(x, 8, -1),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2),
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [4, 12], -1),
}


@pytest.mark.parametrize("cut", LISTS.values(), ids=LISTS)
def test_parts_of_a_list_stand_on_what_was_cut(cut):
    graph = graph_of(lambda x: list(cut(x)))
    (parts,) = next(iter(reversed(graph.nodes))).args
    root = roots(graph)
    assert len(parts) > 1 and {root[p] for p in parts} == {list(graph.nodes)[1]}  # after the parameter: x
    assert all(map(is_view, parts)) and not any(map(writes, graph.nodes))


def test_a_view_that_its_schema_does_not_tell():
    graph = graph_of(lambda x: aten._unsafe_view(x.cos(), [2, 2, WIDTH]))
    assert roots(graph)[only(graph, aten._unsafe_view.default)] is only(graph, aten.cos.default)


def test_results_that_share_nothing():
    graph = graph_of(lambda x: [*x.max(1), *torch.split_copy(x, 2), x.double()])
    (results,) = next(iter(reversed(graph.nodes))).args
    found = {roots(graph)[x] for x in results}
    assert len(found) == len(results) and not any(x.op == "placeholder" for x in found)


def test_what_is_sent_is_in_use_until_it_was_waited_for():
    def fn(x):
        shard = x.cos().view(-1)
        full = zerofn.collectives.all_gather(shard)
        return (full + 1).sum()

    with fake_ranks(2):
        graph = graph_of(fn)
    where, root = positions(graph), roots(graph)
    last = last_uses(graph, where, root)
    assert last[only(graph, aten.cos.default)] == where[only(graph, ops.wait.default)]


def test_the_last_writer_before_a_node_is_found_through_views():
    def fn(x):
        y = x.cos()
        first = y.sum()
        y[0].zero_()
        y[1:].view(-1).mul_(2)
        return first, y.exp(), x.exp()

    graph = graph_of(fn)
    writer = written_before(graph, positions(graph), roots(graph))
    of_y, of_x = (n for n in graph.nodes if n.target is aten.exp.default)
    assert writer[of_y] is only(graph, aten.mul_.Tensor) and of_x not in writer
    assert only(graph, aten.sum.default) not in writer


def test_a_loop_writes_to_the_rows_it_is_given():
    module = build(2)
    seen = torch.zeros(WIDTH)

    def step(state, batch):
        total, fresh = seen.clone(), {k: v.clone() for k, v in batch.items()}

        def loss_fn(params, rows):
            rows["x"].mul_(2)
            total.add_(rows["x"].sum(0))
            return loss_of(module)(params, rows)

        loss, _ = zerofn.accumulate(state.value_and_grad(loss_fn), 2)(fresh)
        return loss, total

    graph = captured(step, state_of(module, 3), batch_of()).gm.graph
    root = roots(graph)
    written = [root[x] for x in writes(only(graph, repeat))]
    assert [x.target for x in written] == [aten.clone.default] * 2 and len(set(written)) == 2
