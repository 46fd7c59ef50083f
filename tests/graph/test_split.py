"""A body, and its forward and its backward pass one after the other."""

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zerofn
from tests.graph.test_liveness import compare
from tests.support import tiny_models
from tests.support.bodies import body_of, inlined
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    Normed,
    adapted_loss_of,
    batch_of,
    build,
    captured,
    fake_ranks,
    gathers,
    loss_of,
    results,
    state_of,
    step_with,
)
from zerofn import Pass, optim, passes
from zerofn.graph.alias import memory_of
from zerofn.graph.liveness import AGAIN, memory_bytes, moments
from zerofn.graph.nested import calls
from zerofn.graph.node_kinds import is_start, wait_of
from zerofn.graph.phase import BACKWARD, FORWARD, phase, phase_of
from zerofn.graph.split import split_by_phase
from zerofn.runtime.executor import Executor

aten, ops = torch.ops.aten, torch.ops.zerofn
ROWS = 4  # of two microbatches


class Odd(torch.nn.Module):
    """Sizes that no number of ranks divides, dropout, and a part that torch computes again for the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(7, 13), torch.nn.LayerNorm(13), torch.nn.Linear(13, 3)

    def forward(self, x):
        y = checkpoint(lambda x: torch.nn.functional.gelu(self.norm(self.first(x))), x, use_reentrant=False)
        return self.last(torch.nn.functional.dropout(y, 0.2))


def small(module, loss_fn, batch):
    return lambda **options: state_of(module, 3, **options), loss_fn, batch


def odd():
    torch.manual_seed(0)
    module = Odd()
    batch = {"x": torch.randn(ROWS, 7), "y": torch.randn(ROWS, 3)}
    return small(module, lambda p, b: (functional_call(module, p, (b["x"],)) - b["y"]).square().mean(), batch)


def layers():
    module = build(6, dropout=0.1)
    return small(module, loss_of(module), batch_of(rows=ROWS))


def adapted():
    """A loss with a gradient in it, whose loop is a loop in the loop."""
    module = build(2)
    return small(module, adapted_loss_of(module), batch_of(rows=2 * ROWS))


def hugging_face(name):
    torch.manual_seed(0)
    model = tiny_models.BUILDERS[name]()

    def loss_fn(params, batch):
        return functional_call(model, params, (), batch).logits.float().square().mean()

    def make(**options):
        state = zerofn.TrainState.create(params=dict(model.named_parameters()), tx=optim.adamw(1e-3))
        return zerofn.shard(state, stage=3, **options)

    return make, loss_fn, tiny_models.batch(name)


MODELS = {
    "layers": layers,
    "odd": odd,
    "adapted": adapted,
    "gpt2": lambda: hugging_face("gpt2"),
    "t5": lambda: hugging_face("t5"),
    "mixtral": lambda: hugging_face("mixtral"),
}


def split(program):
    """Split the bodies of loops of microbatches."""
    found = list(calls(program.gm))
    assert found
    for _, call in found:
        setattr(program.gm, call.name, split_by_phase(call.body))


def at(name):
    return {"passes": passes.before(name, Pass(split, searched=False))}


def in_each_microbatch(known):
    """No gather moves out of the loop."""
    return [x for x in known if x.name != "hoist_gathers"]


def trained(name, precision=None, **options):
    """Losses and parameters of two steps of two microbatches, and the planned peak."""
    make, loss_fn, batch = MODELS[name]()
    state, step = make(precision=precision), zerofn.compile(step_with(loss_fn, 2), **options)
    losses = []
    for _ in range(2):
        state, loss = step(state, batch)
        losses.append(loss)
    return [*losses, *zerofn.tree.leaves(zerofn.unshard(state.params))], step.lower(state, batch).memory().total


# As captured; with transfers cut into starts and waits that lie apart; as it will run.
PLACES = ("canonicalize", "read_local_shards", "assign_buffers")


@pytest.mark.part(name=["odd", "adapted", "mixtral"])
@pytest.mark.parametrize("name", MODELS)
def test_two_pieces_have_the_bits_of_the_whole(name):
    make, loss_fn, batch = MODELS[name]()
    state, step = make(), step_with(loss_fn, 2)
    program = captured(step, state, batch)
    expected = results(program, state, batch)
    split(program)
    assert all(len(list(calls(each.body))) == 2 for _, each in calls(program.gm))
    assert_same_trees(results(program, state, batch), expected)


def assert_steps_are_the_same(name, places, **options):
    expected, peak = trained(name, **options)
    for place in places:
        found, ours = trained(name, **options, **at(place))
        assert_same_trees(found, expected, f"{name} {options} {place} stage 3")
        assert ours == peak


@pytest.mark.part(options=[{"remat": "full"}])
@pytest.mark.parametrize(
    ("name", "options"), [("odd", {}), ("odd", {"remat": "full"}), ("layers", {"precision": "fp16"})]
)
def test_all_passes_take_a_split_body(name, options):
    assert_steps_are_the_same(name, PLACES, **options)


@pytest.mark.whole
def test_all_passes_take_a_split_body_on_two_ranks(ranks):
    ranks(2, assert_steps_are_the_same, "odd", PLACES[::2])


def gathering_again():
    """Steps that gather units again for the backward pass: the numbers of gathers of both passes."""
    expected, _ = trained("layers", passes=in_each_microbatch)
    edit = at("assign_buffers")["passes"]
    split_again = {"passes": lambda known: in_each_microbatch(edit(known))}
    found, _ = trained("layers", **split_again)
    assert_same_trees(found, expected, "stage 3")
    make, loss_fn, batch = MODELS["layers"]()
    program = zerofn.compile(step_with(loss_fn, 2), **split_again).lower(make(), batch).program
    ((_, call),) = calls(program.gm)
    return [len(gathers(each.body)) for each in halves(call.body)]


def test_what_is_gathered_again_is_the_backward_pass_s(ranks):
    assert ranks(2, gathering_again) == [[6, 2]] * 2


def test_a_transfer_starts_where_it_is_waited_for():
    def forward(x):
        shard = x.sin().view(-1)
        return shard, zerofn.collectives.all_gather(shard)

    with fake_ranks(2):
        body = in_phases(forward, lambda shard, whole: [shard * 2, whole * 2], X)
        wait = next(x for x in body.graph.nodes if x.target is ops.wait.default)
        wait.meta["phase"] = BACKWARD  # as if the start had been moved up
        first, second = halves(split_by_phase(body))
    assert not any(map(is_start, first.body.graph.nodes)) and len(first.results) == 1
    (start,) = filter(is_start, second.body.graph.nodes)
    assert wait_of(start)


def test_what_is_planned_is_what_is_allocated():
    make, loss_fn, _ = MODELS["layers"]()
    for options in ({}, at("canonicalize"), at("assign_buffers")):
        predicted, found = compare(make, step_with(loss_fn, 2), batch_of(rows=64), **options)
        assert predicted == found


def halves(gm):
    """The forward and the backward pass of a split body."""
    (first, _), (second, _) = ((each, node) for node, each in calls(gm))
    return first, second


def targets(call):
    return [x.target for x in call.body.graph.nodes if x.op == "call_function"]


def test_what_is_computed_again_is_not_handed_over():
    make, loss_fn, batch = MODELS["layers"]()
    handed = []
    for options in ({}, {"remat": "full"}):
        program = zerofn.compile(step_with(loss_fn, 2), **at("assign_buffers"), **options).lower(make(), batch).program
        ((_, call),) = calls(program.gm)
        first, second = halves(call.body)
        handed.append(sum(memory_bytes(x.meta["val"]) for x in first.results))
        assert any(x.meta.get(AGAIN) for x in second.body.graph.nodes) == bool(options)
        assert not any(x.meta.get(AGAIN) for x in first.body.graph.nodes)
        assert not any(phase_of(x) == BACKWARD for x in first.body.graph.nodes)
    assert handed[1] < handed[0] / 2


def in_phases(forward, backward, *inputs):
    """The body of `backward(*forward(*inputs))`."""

    def fn(*given):
        with phase(FORWARD):
            found = forward(*given)
        with phase(BACKWARD):
            return backward(*found)

    return body_of(fn, *inputs)


def check(body, *inputs):
    """Split a body, compare, and return its halves."""
    gm = split_by_phase(body)
    expected = Executor(body).run([x.clone() for x in inputs])
    assert_same_trees(Executor(gm).run([x.clone() for x in inputs]), expected)
    assert_same_trees(Executor(inlined(gm)).run([x.clone() for x in inputs]), expected)
    for each in (gm, *(call.body for call in halves(gm))):
        each.graph.lint()
    return halves(gm)


X = torch.randn(6, 6)


def test_views_of_one_memory_are_handed_over_once():
    def forward(x):
        h = x.sin()
        return h, h.t(), h[1:], h.split(2), x.t()

    def backward(h, turned, tail, parts, given):
        return [h @ turned, tail * 2, parts[1].exp(), given + 1, h[0], given]

    first, second = check(in_phases(forward, backward, X), X)
    (saved,) = first.results
    assert saved.target is aten.sin.default
    assert [memory_of(x).target for x in second.given.values()].count("arg0_1") == 1  # the input itself
    assert targets(first) == [aten.sin.default]


def test_of_several_results_those_that_are_read_are_handed_over():
    def forward(x):
        return torch.nn.functional.layer_norm(x, (6,)), x.max(1)

    def backward(y, most):
        return [y * 2, most.indices]

    first, _ = check(in_phases(forward, backward, X), X)
    assert len(first.results) == 2


def test_writes_of_the_forward_pass_are_seen_by_the_backward_pass():
    def forward(x):
        h = torch.zeros(6, 6)
        h[1:].copy_(x[1:])
        part = h[0]
        part.add_(3)
        return h.mul_(2), part

    first, second = check(in_phases(forward, lambda h, part: [h.exp(), part * 2, part], X), X)
    assert len(first.results) == 1 and aten.copy_.default not in targets(second)


def test_what_the_backward_pass_reads_first_is_written_behind_it():
    def fn(x):
        with phase(FORWARD):
            h = x.sin()
        with phase(BACKWARD):
            grad = h * 2
        with phase(FORWARD):
            h.add_(1)
            other = h.cos()
        return [grad, h, other]

    first, second = check(body_of(fn, X), X)
    assert targets(first) == [aten.sin.default]
    assert targets(second) == [aten.mul.Tensor, aten.add_.Tensor, aten.cos.default]


def test_the_backward_pass_may_write_to_what_it_is_handed():
    def backward(h):
        before = h.sum()
        h.mul_(3)
        return [before, h, h[0]]

    first, second = check(in_phases(lambda x: (x.sin(),), backward, X), X)
    assert len(first.results) == 1 and len(second.results) == 1


def test_running_values_are_written_in_the_forward_pass():
    module = Normed()
    buffers = {k: v.clone() for k, v in module.named_buffers()}

    def step(state, batch):
        inside = {k: v.clone() for k, v in state.extra.items()}

        def loss_fn(params, batch):
            return functional_call(module, (params, inside), (batch["x"],)).square().mean()

        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), 2)(batch)
        return state.apply_gradients(grads, extra=inside), loss

    state, batch = state_of(module, 3, extra=buffers), batch_of(rows=8)
    program = captured(step, state, batch)
    expected = results(program, state, batch)
    split(program)
    assert_same_trees(results(program, state, batch), expected)


def test_what_is_handed_over_is_freed_in_the_backward_pass():
    def forward(x):
        a = x.sin()
        b = a.cos()
        return a, b, b.exp()

    def backward(a, b, c):
        g = c * 2
        g = g * b
        return [g * a]

    gm = split_by_phase(in_phases(forward, backward, X))
    size = X.nbytes
    found = [x.nbytes // size for x in moments(gm, {}) if phase_of(x.node) == BACKWARD]
    assert found[:3] == [4, 4, 3]  # a, b, c and g; a, b and two of g, as c is gone; a and two of g


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="the body has no backward pass"):
        split_by_phase(body_of(lambda x: [x.sin()], X))
    body = in_phases(lambda x: (x.sin(),), lambda h: [h * 2], X)
    sine = next(x for x in body.graph.nodes if x.target is aten.sin.default)
    sine.kwargs = {"place": [0, 0]}
    with pytest.raises(ValueError, match="Call split_by_phase before assign_buffers"):
        split_by_phase(body)
    with pytest.raises(ValueError, match=r"unsqueeze_.* changes the shape of its input in place"):
        split_by_phase(in_phases(lambda x: (aten.unsqueeze_(x.sin(), 0),), lambda h: [h * 2], X))
