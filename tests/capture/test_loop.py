import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    Normed,
    batch_of,
    build,
    captured,
    fake_ranks,
    inputs_of,
    loss_of,
    results,
    same,
    state_of,
    train_step_of,
)
from zerofn import tree
from zerofn.capture.loop import loop
from zerofn.graph.alias import writes
from zerofn.graph.nested import calls, graphs_of

aten = torch.ops.aten


def sums_and_rows(index, slices):
    x, y = slices
    return [(x * y).sum() + index, x.clone()], [x.mean(), y * 2, "name"], "static"


def unrolled(n, xs, ys):
    rounds = [sums_and_rows(torch.tensor(i), [xs[i], ys[i]]) for i in range(n)]
    sums = [sum(r[0][k] for r in rounds[1:]) + rounds[0][0][k] if n > 1 else rounds[0][0][k] for k in range(2)]
    return sums, [torch.stack([r[1][k] for r in rounds]) for k in range(2)]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_sums_and_stacks(n):
    xs, ys = torch.randn(n, 3, dtype=torch.float64), torch.randn(n, 3, dtype=torch.float64)
    sums, rows, static = loop(sums_and_rows, n, [xs, ys])
    expected_sums, expected_rows = unrolled(n, xs, ys)
    for a, b in zip(sums, expected_sums, strict=True):
        torch.testing.assert_close(a, b)
    assert same(rows[:2], expected_rows) and rows[2] == ["name"] * n and static == "static"


def test_a_round_may_choose_rows_by_its_data():
    """How many rows there are is a round's own, and nothing outside has that size."""

    def train_step(state, batch):
        def body(index, slices):
            (x,) = slices
            chosen = (x * state["params"])[x > 0]
            return [chosen.sum()], [chosen.square().sum()], None

        sums, rows, _ = loop(body, 3, [batch])
        return state, (sums[0], rows[0])

    x, params = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), torch.arange(1.0, 6.0)
    _, (total, rows) = zerofn.compile(train_step)({"params": params}, x)
    chosen = torch.where(x > 0, x * params, 0)
    torch.testing.assert_close(total, chosen.sum())
    torch.testing.assert_close(rows, chosen.square().sum(1))


def stepped(n):
    def step(state, batch):
        sums, rows, _ = loop(lambda i, s: ([s[0] @ state["params"]], [s[0].amax(), i], None), n, [batch["x"]])
        return sums, rows

    return step


@pytest.mark.parametrize("n", [1, 2, 4])
def test_captured_it_is_one_node_whatever_the_number_of_rounds(n):
    state, batch = {"params": torch.randn(16)}, {"x": torch.randn(n, 3, 16)}
    program = captured(stepped(n), state, batch)
    ((_, call),) = calls(program.gm)
    assert call.rounds == n and call.num_sums == 1
    body = call.body
    assert sum(x.target is aten.mv.default for x in body.graph.nodes) == 1
    assert all(x.target is not aten.mv.default for x in program.gm.graph.nodes)
    assert_same_trees(results(program, state, batch), tree.leaves(stepped(n)(state, batch)))
    with torch.no_grad():
        assert_same_trees(program.gm(*inputs_of(state, batch)), results(program, state, batch))


def carrying(state, batch):
    """Each round reads what the one before wrote."""
    total = state["total"].clone()

    def body(index, slices):
        total.mul_(0.5).add_(slices[0])
        return [total.sum()], [total.clone()], None

    sums, rows, _ = loop(body, 3, [batch["x"]])
    return {**state, "total": total}, (sums, rows)


def test_what_the_body_writes_is_carried_in_order():
    state, batch = {"params": torch.ones(2), "total": torch.randn(16)}, {"x": torch.randn(3, 16)}
    program = captured(carrying, state, batch)
    ((node, _),) = calls(program.gm)
    assert len(writes(node)) == 1
    assert_same_trees(results(program, state, batch), tree.leaves(carrying(state, batch)))
    call = zerofn.compile(carrying)
    eager, state = carrying(state, batch)[0], call(state, batch)[0]
    assert torch.equal(eager["total"], state["total"])


def test_two_loops_have_two_bodies():
    def step(state, batch):
        first, _, _ = loop(lambda i, s: ([s[0] * state["params"]], [], None), 2, [batch["x"]])
        second, _, _ = loop(lambda i, s: ([s[0] + first[0]], [], None), 2, [batch["x"]])
        return second

    state, batch = {"params": torch.randn(16)}, {"x": torch.randn(2, 16)}
    program = captured(step, state, batch)
    assert len(list(calls(program.gm))) == 2
    assert_same_trees(results(program, state, batch), step(state, batch))


def test_gathers_stay_inside_the_body():
    module = build()
    with fake_ranks(2):
        program = captured(train_step_of(module, 4), state_of(module, 3), batch_of())
    ((_, call),) = calls(program.gm)
    targets = [str(n.target) for n in call.body.graph.nodes]
    assert any("all_gather" in t for t in targets) and any("reduce_scatter" in t for t in targets)


def test_the_number_of_nodes_does_not_depend_on_the_number_of_rounds():
    module = build()
    sizes = set()
    for n in (2, 4):
        program = captured(train_step_of(module, n), state_of(module, 3), batch_of())
        sizes.add(tuple(len(gm.graph.nodes) for gm in graphs_of(program.gm)))
    assert len(sizes) == 1


def test_batch_norms_running_values_go_from_microbatch_to_microbatch():
    module = Normed()
    buffers = {k: v.clone() for k, v in module.named_buffers()}

    def step(state, batch):
        inside = {k: v.clone() for k, v in state.extra.items()}

        def loss_fn(params, batch):
            return torch.func.functional_call(module, (params, inside), (batch["x"],)).square().mean()

        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), 2)(batch)
        return state.apply_gradients(grads, extra=inside), loss

    batch = batch_of(rows=8)
    state, _ = zerofn.compile(step)(state_of(module, 3, extra=buffers), batch)
    eager, _ = step(state_of(module, 3, extra=buffers), batch)
    plain = Normed()
    for x in batch["x"].chunk(2):
        plain(x)
    for name, value in plain.named_buffers():
        assert torch.equal(state.extra[name], value) and torch.equal(eager.extra[name], value)


@pytest.mark.part(used=[True])
@pytest.mark.parametrize("used", [False, True])
def test_what_a_microbatch_leaves_outside_has_no_value(used):
    """Not returned, and not computed with: it would be a tensor that stands in for one."""
    module = build()

    def step(state, batch):
        kept = []

        def loss_fn(params, batch):
            y = torch.func.functional_call(module, params, (batch["x"],))
            kept.append(y.detach().mean())
            return y.square().mean()

        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), 2)(batch)
        return state.apply_gradients(grads), {"loss": loss, "kept": loss + kept[-1] if used else kept}

    where = r"at .*test_loop.py:\d+" if used else r"as its result 'kept.0'"
    with pytest.raises(zerofn.CaptureError, match=rf"{where} .*that a microbatch of `accumulate`.*has_aux=True"):
        zerofn.compile(step)(state_of(module, 3), batch_of(rows=8))


def test_gradients_are_those_of_the_whole_batch():
    module = build(dtype=torch.float64)
    batch = batch_of(rows=8, dtype=torch.float64)
    loss_fn = loss_of(module)
    params = {k: p.detach() for k, p in module.named_parameters()}
    whole = zerofn.value_and_grad(loss_fn)(params, batch)
    for n in (1, 2, 4, 8):
        parts = zerofn.accumulate(zerofn.value_and_grad(loss_fn), n)(params, batch)
        torch.testing.assert_close(parts, whole)


def handing_on(n):
    """A body whose outputs are the batch's memory, one tensor twice, one number expanded, a buffer it writes."""

    def step(state, batch):
        total = state["total"].clone()

        def body(index, slices):
            x, weight = slices
            total.add_(x)
            twice = x * 2
            return [weight, twice, twice, x[0].expand(3)], [total, x, state["total"]], None

        sums, rows, _ = loop(body, n, [batch["x"], batch["weight"]])
        return [*sums, *rows]

    return step


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("how", [lambda step: step, zerofn.compile], ids=["eager", "compiled"])
def test_results_have_memory_of_their_own(how, n):
    state, batch = {"params": torch.ones(2), "total": torch.ones(2)}, {"x": torch.randn(n, 2), "weight": torch.rand(n)}
    before = [x.clone() for x in tree.leaves((state, batch))]
    found = how(handing_on(n))(state, batch)
    x, weight = batch["x"], batch["weight"]
    expected = [weight.sum(), 2 * x.sum(0), 2 * x.sum(0), x[:, 0].sum().expand(3), 1 + x.cumsum(0), x, torch.ones(n, 2)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a in found:
        a.zero_()  # raises where elements share memory
    assert same(tree.leaves((state, batch)), before) and not any(map(torch.any, found))
    assert len({a.data_ptr() for a in found}) == len(found)


def test_rows_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"shape \(1,\) in microbatch 1, but shape \(2,\) in earlier ones"):
        loop(lambda i, s: ([], [torch.ones(2 - int(i))], None), 2, [torch.ones(2)])


def test_strided_rows_and_strided_tensors_the_body_closes_over():
    """The body is captured for the strides it will be given."""

    def step(state, batch):
        other = batch["wide"][:, 4:8]
        body = lambda i, s: ([s[0].reshape(-1).sum() * other.reshape(-1)], [s[0].reshape(-1) * 2], None)  # noqa: E731
        sums, rows, _ = loop(body, 2, [batch["rows"].reshape(2, 3, 4)])
        return sums, rows

    wide = torch.randn(6, 9)
    state, batch = {"params": torch.ones(2)}, {"rows": wide[:, :4], "wide": wide}
    assert_same_trees(zerofn.compile(step)(state, batch), step(state, batch))
