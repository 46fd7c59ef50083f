"""Attention by layouts in steps, eager and captured, at every stage: plain torch's with masks, on the global batch."""

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.sparse.dense import attended
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from zerofn import optim, sparse
from zerofn.cost.op_cost import flops
from zerofn.graph.nested import graphs_of

HEADS, GROUPS, LENGTH, WIDTH, BLOCK, STEPS = 4, 2, 83, 6, 16, 3
STATIC = (sparse.sinks(2) | sparse.sliding_window(11)) & sparse.causal


def start():
    draw = torch.Generator().manual_seed(1)
    shapes = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    inner = {x: torch.randn(WIDTH, n * WIDTH, generator=draw, dtype=torch.float64) / 2 for x, n in shapes.items()}
    return {**inner, "out": torch.randn(HEADS * WIDTH, WIDTH, generator=draw, dtype=torch.float64) / 10}


def batches(rank):
    draw = torch.Generator().manual_seed(30 + rank)
    rows = torch.randn(STEPS, 2, LENGTH, WIDTH, generator=draw, dtype=torch.float64)
    ends = torch.randint(1, LENGTH, (STEPS, 2, 3), generator=draw).sort(2).values
    ends = torch.cat([torch.zeros_like(ends[..., :1]), ends, torch.full_like(ends[..., :1], LENGTH)], 2)
    return [{"rows": x, "ends": y} for x, y in zip(rows, ends, strict=True)]


def in_heads(x, width):
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def best_blocks(q, k):
    """The numbers of the 2 blocks of keys whose mean is nearest to that of each block of queries."""
    pad = (0, 0, 0, -LENGTH % BLOCK)
    q, k = (torch.nn.functional.pad(x, pad).unflatten(2, (-1, BLOCK)).mean(3) for x in (q, k))
    return (q @ k.repeat_interleave(HEADS // GROUPS, 1).mT).topk(2).indices


def loss_with(attend):
    """`attend(q, k, v, kind, batch)`"""

    def loss_fn(params, batch):
        x = batch["rows"]
        for kind in ("static", "documents", "chosen"):
            q, k, v = (in_heads(x @ params[name], WIDTH) for name in "qkv")
            x = x + attend(q, k, v, kind, batch).transpose(1, 2).flatten(2) @ params["out"]
        return x.square().mean()

    return loss_fn


def by_layout(q, k, v, kind, batch):
    if kind == "static":
        return sparse.attention(q, k, v, STATIC)
    if kind == "documents":
        return sparse.attention(q, k, v, sparse.documents(batch["ends"]) & sparse.sliding_window(30), is_causal=True)
    return sparse.attention(q, k, v, sparse.chosen(best_blocks(q, k), BLOCK), is_causal=True)


def by_mask(q, k, v, kind, batch):
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    mask = j <= i
    if kind == "static":
        mask = mask & ((j < 2) | (i - j < 11))
    elif kind == "documents":
        number = (j[None, :, None] >= batch["ends"][:, None]).sum(2)
        mask = mask & (i - j < 30) & (number[:, None, :, None] == number[:, None, None])
    else:
        named = (best_blocks(q, k)[..., None] == torch.arange(-(-LENGTH // BLOCK))).any(3)
        mask = mask & named.repeat_interleave(BLOCK, 3).repeat_interleave(BLOCK, 2)[:, :, :LENGTH, :LENGTH]
    return attended(q, k, v, mask)[0]


def plain(size):
    """The losses of the global batch, and the parameters after all steps."""
    params, losses, loss_fn = start(), [], loss_with(by_mask)
    leaves = [x.requires_grad_() for x in zerofn.tree.leaves(params)]
    optimizer = torch.optim.SGD(leaves, 0.01, 0.9)
    for step in range(STEPS):
        loss = sum(loss_fn(params, batches(rank)[step]) for rank in range(size)) / size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, zerofn.tree_map(torch.detach, params)


def trained(stage, captured, options):
    state = zerofn.shard(zerofn.TrainState.create(params=start(), tx=optim.sgd(0.01, 0.9)), stage=stage)
    step, losses = step_with(loss_with(by_layout)), []
    step = zerofn.compile(step, **options) if captured else step
    for batch in batches(dist.get_rank() if dist.is_initialized() else 0):
        state, loss = step(state, batch)
        losses.append(loss.item())
    return losses, zerofn.unshard(state.params)


def trained_each(cases):
    return [trained(*case) for case in cases]


ALL = [(stage, captured, {}) for stage in range(4) for captured in (False, True)]
FEW = [(0, True, {}), (3, False, {}), (3, True, {})]


@pytest.mark.part(cases=[FEW])
@pytest.mark.parametrize("size, cases", [(2, FEW), *((size, ALL) for size in (1, 2, 3, 4))])
def test_every_stage_is_plain_torch(ranks, size, cases):
    losses, params = plain(size)
    for found in ranks(size, trained_each, cases):
        for mine, ours in found:
            assert mine == pytest.approx(losses, rel=1e-12)
            for x, y in zip(zerofn.tree.leaves(params), zerofn.tree.leaves(ours), strict=True):
                torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)
        for _, ours in found[1:]:
            assert_same_trees(ours, found[0][1])


def test_recomputing_gives_the_same_bits():
    plainly = trained(0, True, {})
    for options in ({"remat": "full"}, {"memory": "1GB"}):
        losses, params = trained(0, True, options)
        assert losses == plainly[0]
        assert_same_trees(params, plainly[1])


def test_a_plan_counts_the_pairs_of_computed_tiles():
    state = zerofn.TrainState.create(params=start(), tx=optim.sgd(0.1))
    step = zerofn.compile(step_with(loss_with(lambda q, k, v, kind, batch: by_layout(q, k, v, "static", batch))))
    plan = step.lower(state, batches(0)[0])
    pairs = 2 * HEADS * sparse.layout(STATIC, LENGTH).computed
    nodes = [n for gm in graphs_of(plan.graph) for n in gm.graph.nodes if "block_attention" in str(n.target)]
    forward = [n for n in nodes if "backward" not in str(n.target)]
    assert [flops(n) for n in forward] == 3 * [2 * pairs * 2 * WIDTH]
    assert [flops(n) for n in nodes if n not in forward] == 3 * [2 * pairs * 5 * WIDTH]


def drawn(captured):
    def loss_fn(params, batch):
        q, k, v = (in_heads(batch["rows"] @ params[name], WIDTH) for name in "qkv")
        out = sparse.attention(q, k, v, STATIC, dropout=0.4)
        return out.square().mean(), out.detach()

    def train_step(state, batch):
        (loss, out), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)
        return state.apply_gradients(grads), (loss, out)

    state = zerofn.TrainState.create(params=start(), tx=optim.sgd(0.0))
    step, found = zerofn.compile(train_step) if captured else train_step, []
    for _ in range(2):
        state, results = step(state, batches(0)[0])
        found.append(results)
    return found


def test_dropout_draws_from_the_steps_key():
    eager, captured = drawn(False), drawn(True)
    assert_same_trees(eager, captured)
    assert not torch.equal(eager[0][1], eager[1][1])


def test_documents_known_at_capture_are_tiles_of_the_layout():
    ends = torch.tensor([0, 20, 70, LENGTH])
    pattern = sparse.documents(ends) & sparse.causal
    state = zerofn.TrainState.create(params=start(), tx=optim.sgd(0.1))
    loss_fn = loss_with(lambda q, k, v, kind, batch: sparse.attention(q, k, v, pattern))
    step, eager = zerofn.compile(step_with(loss_fn)), step_with(loss_fn)
    plan = step.lower(state, batches(0)[0])
    pairs = 2 * HEADS * sparse.layout(pattern, LENGTH).computed
    found = [n for gm in graphs_of(plan.graph) for n in gm.graph.nodes if "block_attention" in str(n.target)]
    assert flops(found[0]) == 2 * pairs * 2 * WIDTH
    expected = eager(state, batches(0)[0])[1]
    torch.testing.assert_close(step(state, batches(0)[0])[1], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("ends", [[0, 50, 20, LENGTH], [1, 20, 50, LENGTH], [0, 20, 50, LENGTH + 1]])
def test_ends_of_a_batch_that_do_not_increase_are_an_error_of_the_step(ends):
    """It is captured with others, which are right."""
    state = zerofn.shard(zerofn.TrainState.create(params=start(), tx=optim.sgd(0.1)), stage=0)
    step, batch = zerofn.compile(step_with(loss_with(by_layout))), batches(0)[0]
    batch["ends"] = torch.tensor([[0, 20, 50, LENGTH], [0, 20, 50, LENGTH]])
    state, loss = step(state, batch)
    before = zerofn.unshard(state.params)
    with pytest.raises(ValueError, match="in this step's batch, a row's cu_seqlens must start at 0, never decrease"):
        step(state, {**batch, "ends": torch.tensor([[0, 20, 50, LENGTH], ends])})
    assert_same_trees(zerofn.unshard(state.params), before)
    state, after = step(state, batch)
    assert after < loss


def test_a_step_may_make_a_layout():
    x = torch.randn(1, 2, LENGTH, WIDTH)
    step = zerofn.compile(lambda _, x: sparse.attention(x, x, x, sparse.layout(STATIC, LENGTH)))
    assert torch.equal(step(None, x), sparse.attention(x, x, x, STATIC))


def test_a_function_that_reads_the_batch_is_refused():
    batch = {"x": torch.randn(1, 2, LENGTH, WIDTH), "window": torch.tensor(3), "width": 3}

    def attend(name):
        return lambda _, batch: sparse.attention(*3 * [batch["x"]], lambda head, query, key: query - key < batch[name])

    with pytest.raises(ValueError, match="the layout's function reads a tensor of the step"):
        zerofn.compile(attend("window"))(None, batch)
    assert torch.equal(zerofn.compile(attend("width"))(None, batch), attend("width")(None, batch))


def test_a_step_is_captured_again_if_a_function_reads_another_value():
    x, settings = torch.randn(1, 2, LENGTH, WIDTH), {"window": 3}
    near = sparse.pattern(lambda head, query, key: (query - key).abs() < settings["window"])
    step = zerofn.compile(lambda _, x: sparse.attention(x, x, x, near))
    for window in (3, 7):
        settings["window"] = window
        assert torch.equal(step(None, x), sparse.attention(x, x, x, sparse.sliding_window(window)))
