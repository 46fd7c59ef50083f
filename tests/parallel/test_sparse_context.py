"""Attention by layouts over cut sequences beside dense masks over whole ones, in float64; and what ranks send."""

import functools
import itertools

import pytest
import torch

import zerofn
from tests.sparse.dense import attended
from tests.support.small_steps import step_with
from zerofn import optim, sparse
from zerofn.comm.mesh import Axis, Mesh
from zerofn.comm.transport import SentBytes
from zerofn.parallel import Chunks, attention, balanced_chunks
from zerofn.util.process import the

LENGTH, WIDTH, OF_VALUES = 444, 5, 3  # chunks of 222, 111 or 74 tokens, in tiles of 64
ENDS = torch.tensor([0, 101, 230, 231, LENGTH])
ROWS = torch.tensor([[0, 7, 200, 200, LENGTH], [0, 150, 300, 420, 430]])
KEPT = torch.arange(LENGTH) % 7 < torch.tensor([[5], [7]])
KEPT[1, :300] = False
PATTERNS = {
    "window": lambda: sparse.sliding_window(50),
    "sinks and window": lambda: sparse.sinks(3) | sparse.sliding_window(20),
    "per head": lambda: sparse.pattern(by_head) & sparse.sliding_window(90),
    "bigbird": lambda: sparse.deepspeed.bigbird(block=16, different_layout_per_head=True),
    "prefix": lambda: sparse.prefix(130),
    "documents": lambda: sparse.documents(ENDS),
    "documents of rows": lambda: sparse.documents(ROWS) & sparse.sliding_window(60),
    "padding": lambda: sparse.padding(KEPT) & sparse.sliding_window(90),
    "nothing": lambda: sparse.pattern(lambda head, query, key: (query < 10) & (key < 0)),
}


def by_head(head, query, key):
    return (key + head) % 3 != 0


def mask_of(name, heads, causal):
    """Booleans [rows or 1, heads or 1, L, L]."""
    head, query, key = torch.arange(heads)[:, None, None], torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    near = (query - key).abs()
    if name == "bigbird":
        layout = sparse.layout(PATTERNS[name](), LENGTH, heads=heads)
        mask = (layout.status > 0).repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :LENGTH, :LENGTH]
    elif name.startswith("documents"):
        ends = ROWS if name.endswith("rows") else ENDS[None]
        number = (torch.arange(LENGTH)[None, :, None] >= ends[:, None]).sum(2)
        inside = (number > 0) & (number < ends.shape[1])
        mask = (number[:, :, None] == number[:, None]) & inside[:, None] & inside[:, :, None]
        mask = (mask & (near < 60) if name.endswith("rows") else mask)[:, None]
    elif name == "padding":
        mask = (near < 90) & KEPT[:, None, None]
    else:
        mask = {
            "window": near < 50,
            "sinks and window": (key < 3) | (near < 20),
            "per head": by_head(head, query, key) & (near < 90),
            "prefix": (key < 130) & (query < 130),
            "nothing": torch.zeros(LENGTH, LENGTH, dtype=torch.bool),
        }[name]
    mask = mask & (key <= query) if causal else mask
    return mask[(None,) * (4 - mask.dim())]


def whole(heads, groups):
    draw = torch.Generator().manual_seed(heads)
    shapes = [(heads, WIDTH), (groups, WIDTH), (groups, OF_VALUES)]
    return [torch.randn(2, n, LENGTH, width, generator=draw, dtype=torch.float64) for n, width in shapes]


def on_ranks(method, cases, chunks=None):
    mesh = Mesh.make(context=-1)
    axis, found = mesh.axis("context"), []
    dealt = Chunks.early_and_late(axis.size) if chunks is None else chunks
    for name, heads, groups, causal in cases:
        parts = [dealt.part(x, axis.rank, 2).requires_grad_() for x in whole(heads, groups)]
        out = attention(*parts, axis=axis, method=method, causal=causal, layout=PATTERNS[name](), chunks=chunks)
        found.append((out.detach(), *torch.autograd.grad(out.sin().sum(), parts)))
    return found


@functools.cache
def expected(name, heads, groups, causal):
    leaves = [x.requires_grad_() for x in whole(heads, groups)]
    out = attended(*leaves, mask_of(name, heads, causal))[0]
    return out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)


CASES = [(name, 6, 3, causal) for name, causal in itertools.product(PATTERNS, (True, False))]
DEALS = {3: [None, Chunks.in_order(3), Chunks(((0, 3), (1, 5), (2, 4)))], 2: [None, Chunks.in_order(2)], 1: [None]}


@pytest.mark.part(num_ranks=[2], method=["ring"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_values_and_gradients_are_those_of_a_dense_mask(ranks, num_ranks, method):
    for chunks in DEALS[num_ranks]:
        dealt = Chunks.early_and_late(num_ranks) if chunks is None else chunks
        for rank, found in enumerate(ranks(num_ranks, on_ranks, method, CASES, chunks)):
            for case, mine in zip(CASES, found, strict=True):
                for ours, all_of_it in zip(mine, expected(*case), strict=True):
                    torch.testing.assert_close(
                        ours, dealt.part(all_of_it, rank, 2), rtol=0, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}"
                    )


def sent_by(cases, chunks):
    """Bytes of each case, forward and backward."""
    group, found = Mesh.make(context=-1).axis("context").group, []
    for case in cases:
        before = the(SentBytes).by_group[group]
        on_ranks("ring", [case], chunks)
        found.append(the(SentBytes).by_group[group] - before)
    return found


def needed(name, heads, causal, chunks):
    """How many keys of rank s rank r needs, [s, r]: all of a block of 64 of a chunk, of which it looks at one."""
    places = [chunks.part(torch.arange(LENGTH), rank) for rank in range(chunks.size)]
    mask = mask_of(name, heads, causal).flatten(0, 1).any(0)
    tile = 16 if name == "bigbird" else 64
    blocks = [[block for x in mine.chunk(chunks.each) for block in x.split(tile)] for mine in places]
    return [[sum(len(x) for x in of_s if mask[mine][:, x].any()) for mine in places] for of_s in blocks]


def test_ranks_send_the_blocks_that_others_look_at(ranks):
    cases = [("window", 4, 2, True), ("bigbird", 4, 4, True), ("documents", 2, 1, False), ("window", 4, 2, False)]
    for chunks in (Chunks.in_order(3), Chunks.early_and_late(3)):
        for rank, found in enumerate(ranks(3, sent_by, cases, chunks)):
            for (name, heads, groups, causal), nbytes in zip(cases, found, strict=True):
                keys = needed(name, heads, causal, chunks)
                moved = sum(keys[rank][r] + keys[r][rank] for r in range(3) if r != rank)
                assert nbytes == moved * 2 * groups * (WIDTH + OF_VALUES) * 8, (name, chunks)


def mesh_of(size):
    return Mesh((Axis("context", size, 0),))


def test_a_causal_window_is_dealt_in_order_and_a_triangle_early_and_late():
    assert balanced_chunks(sparse.sliding_window(64), 4096, mesh_of(4)) == Chunks.in_order(4)
    assert balanced_chunks(sparse.everything, 16384, mesh_of(4)) == Chunks.early_and_late(4)
    assert balanced_chunks(sparse.everything, 16384, mesh_of(4), causal=False) == Chunks.in_order(4)


def test_documents_of_unequal_lengths_are_dealt_by_their_work():
    pattern = sparse.documents(torch.tensor([0, 8192, 16384, *range(16384 + 128, 32769, 128)]))
    chunks = balanced_chunks(pattern, 32768, mesh_of(4))
    assert chunks == balanced_chunks(pattern, 32768, mesh_of(4)) and chunks.each > 1

    def most(chunks):
        """The pairs of the rank with the most, beside the mean."""
        tiles = (sparse.layout(pattern & sparse.causal, 32768).status[0] > 0).sum(1).float()
        work = torch.stack([chunks.part(tiles, rank).sum() for rank in range(4)])
        return float(work.max() / work.mean())

    assert most(chunks) < 1.1 < 1.4 < most(Chunks.early_and_late(4))


def refusals():
    axis = Mesh.make(context=2).axis("context")
    x = torch.ones(1, 2, 8, 2)
    layout = sparse.layout(sparse.sliding_window(4), 16)
    index = torch.zeros(1, 2, 1, 1, dtype=torch.int64)
    bad = [
        ({"layout": layout, "method": "ring"}, "sparse.Layout describes whole sequences"),
        ({"layout": sparse.layout(sparse.pattern(by_head), 16, heads=2)}, "sparse.Layout describes whole sequences"),
        ({"layout": sparse.chosen(index, 16), "method": "ring"}, "the step cannot choose the blocks. Write method="),
        ({"layout": sparse.causal, "mask": torch.ones(16, 16) > 0}, "got a mask and a layout"),
        ({"layout": 3, "method": "ring"}, "must be a pattern"),
        ({"layout": sparse.documents(torch.tensor([0, 20])), "method": "ring"}, "ends at 20, but a row has only 16"),
        ({"chunks": Chunks.in_order(3)}, "expected chunks for 2 ranks, which share a sequence, got chunks for 3"),
        ({"chunks": Chunks(((0, 1, 2), (3, 4, 5)))}, "expected queries and keys of 3 chunks of one size, got 8"),
    ]
    for options, message in bad:
        with pytest.raises((ValueError, TypeError), match=message):
            attention(x, x, x, axis=axis, **options)
    for method in ("ulysses", "ring"):
        same = attention(x, x, x, axis=axis, method=method, layout=sparse.everything)
        torch.testing.assert_close(same, attention(x, x, x, axis=axis, method=method))


def test_mistakes_are_sentences(ranks):
    ranks(2, refusals)
    for bad in ((), ((0, 1), (2,)), ((0, 2), (1, 1)), ((1, 0),)):
        with pytest.raises(ValueError, match="Chunks: "):
            Chunks(bad)
    with pytest.raises(ValueError, match="2 ranks along 'context' cannot divide 7 tokens equally. Pad rows to 8"):
        balanced_chunks(sparse.causal, 7, mesh_of(2))


STEPS, TOKENS, HEADS, GROUPS = 3, 132, 4, 2
KNOWN = torch.tensor([0, 50, 50, TOKENS])
LAYERS = {
    "documents known outside the step": lambda batch: sparse.documents(KNOWN),
    "static": lambda batch: sparse.sinks(2) | sparse.sliding_window(11),
    "documents": lambda batch: sparse.documents(batch["ends"]) & sparse.sliding_window(40),
}


def params():
    draw = torch.Generator().manual_seed(1)
    shapes = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    inner = {x: torch.randn(WIDTH, n * WIDTH, generator=draw, dtype=torch.float64) / 2 for x, n in shapes.items()}
    return {**inner, "out": torch.randn(HEADS * WIDTH, WIDTH, generator=draw, dtype=torch.float64) / 10}


def batches():
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(STEPS, 2, TOKENS, WIDTH, generator=draw, dtype=torch.float64)
    inner = torch.randint(1, TOKENS, (STEPS, 2, 2), generator=draw).sort(2).values
    ends = torch.nn.functional.pad(inner, (1, 0)), torch.full((STEPS, 2, 1), TOKENS)
    return [{"rows": x, "ends": y} for x, y in zip(rows, torch.cat(ends, 2), strict=True)]


def loss_with(attend):
    def loss_fn(params, batch):
        x = batch["rows"]
        for name in LAYERS:
            q, k, v = ((x @ params[n]).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for n in "qkv")
            x = x + attend(q, k, v, LAYERS[name](batch)).transpose(1, 2).flatten(2) @ params["out"]
        return x.square().mean()

    return loss_fn


def init_state():
    return zerofn.TrainState.create(params=params(), tx=optim.sgd(0.01, 0.9))


def trained(sizes, cases):
    """(losses, parameters) for each method, stage, and whether it is captured."""
    mesh, found = Mesh.make(**sizes), []
    for method, stage, captured, chunks in cases:
        attend = functools.partial(attention, axis=mesh.axis("context"), method=method, chunks=chunks)
        step = step_with(loss_with(lambda q, k, v, x, attend=attend: attend(q, k, v, layout=x)))
        step = zerofn.compile(step) if captured else step
        state, losses = zerofn.shard(init_state(), mesh=mesh, stage=stage), []
        context = mesh.axis("context")
        dealt = Chunks.early_and_late(context.size) if chunks is None else chunks
        for batch in batches():
            state, loss = step(state, {**batch, "rows": dealt.part(batch["rows"], context.rank, 1)})
            losses.append(loss.item())
        found.append((losses, zerofn.unshard(state.params)))
    return found


@functools.cache
def plainly():
    """On one process, in plain steps."""
    state, losses = init_state(), []
    step = step_with(loss_with(lambda q, k, v, x: sparse.attention(q, k, v, x, is_causal=True)))
    for batch in batches():
        state, loss = step(state, batch)
        losses.append(loss.item())
    return losses, state.params


def all_cases(size):
    return [
        (method, stage, captured, chunks)
        for method, stage, captured in itertools.product(("ring", "ulysses"), range(4), (False, True))
        for chunks in (None, Chunks.in_order(size))
        if HEADS % size == 0 or method == "ring"
    ]


FEW = [
    ("ring", 3, True, None),
    ("ring", 0, False, None),
    ("ring", 0, True, Chunks.in_order(2)),
    ("ulysses", 2, True, None),
]


@pytest.mark.part(cases=[FEW])
@pytest.mark.parametrize("size, cases", [(2, FEW), *((size, all_cases(size)) for size in (1, 2, 3))])
def test_training_in_parts_is_training_on_whole_rows(ranks, size, cases):
    losses, after = plainly()
    for found in ranks(size, trained, {"context": size}, cases):
        for case, (mine, ours) in zip(cases, found, strict=True):
            assert mine == pytest.approx(losses, rel=1e-12), case
            for name, x in after.items():
                torch.testing.assert_close(ours[name], x, rtol=1e-12, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}")


def told_of_wrong_ends(method):
    """What a step says of documents whose ends do not increase."""
    mesh = Mesh.make(context=-1)
    axis = mesh.axis("context")
    attend = functools.partial(attention, axis=axis, method=method)
    step = zerofn.compile(step_with(loss_with(lambda q, k, v, x: attend(q, k, v, layout=x))))
    state, batch = zerofn.shard(init_state(), mesh=mesh, stage=3), batches()[0]
    rows = Chunks.early_and_late(axis.size).part(batch["rows"], axis.rank, 1)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        step(state, {"rows": rows, "ends": batch["ends"].flip(1)})
    return str(caught.value)


@pytest.mark.part(method=["ring"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_ends_that_do_not_increase_are_an_error_on_all_ranks(ranks, method):
    assert all("cu_seqlens must start at 0, never decrease" in x for x in ranks(2, told_of_wrong_ends, method))
    ranks.stop()  # a step failed


HERE = zerofn.Machine("here", "cpu", 4, 8e9, 1e10, {"float32": 1e10}, link=1e9, network=1e8, host_memory=32e9)


def in_a_ring(mesh):
    """(step, state or what makes it, batch) of a mesh along context."""
    axis = mesh.axis("context")
    attend = functools.partial(attention, axis=axis, method="ring")
    step = step_with(loss_with(lambda q, k, v, x: attend(q, k, v, layout=x)))
    (batch, *_) = batches()
    return step, {**batch, "rows": Chunks.early_and_late(axis.size).part(batch["rows"], axis.rank, 1)}


def planned_and_sent():
    """Bytes of a step by this rank's own plan, and what was sent."""
    mesh = Mesh.make(context=-1)
    step, batch = in_a_ring(mesh)
    state, step = zerofn.shard(init_state, mesh=mesh, stage=3), zerofn.compile(step)
    state, _ = step(state, batch)
    before = the(SentBytes).by_group.total()
    state, _ = step(state, batch)
    return sum(step.lower(state, batch).sent_along.values()), the(SentBytes).by_group.total() - before


def test_plans_count_what_travels(ranks):
    found = ranks(3, planned_and_sent)
    assert all(planned == sent for planned, sent in found) and len(set(found)) > 1
    mesh = Mesh.planned({"context": 3})
    step, batch = in_a_ring(mesh)
    (row,) = zerofn.plan(
        step, init_state, batch, mesh=mesh, machine=HERE, stage=3, precision=None, offload=None, remat=None
    )
    assert sum(row.plan.sent_along.values()) in {sent for _, sent in found}


def weighed(layout):
    """(peak by the allocator, peak by the plan) of a step on rows of 2,048 tokens, in order."""
    mesh = Mesh.make(context=-1)
    axis = mesh.axis("context")
    attend = functools.partial(attention, axis=axis, method="ring", layout=layout, chunks=Chunks.in_order(axis.size))
    step = zerofn.compile(step_with(loss_with(lambda q, k, v, x: attend(q, k, v))))
    state = zerofn.shard(init_state, mesh=mesh, stage=3)
    rows = torch.full((1, 2048 // axis.size, WIDTH), 1.0 + axis.rank, dtype=torch.float64)
    batch = {"rows": rows, "ends": torch.tensor([[0, 2048]])}
    state, _ = step(state, batch)
    (state, _), found = step.profile(state, batch)
    return found.peak, step.lower(state, batch).memory().total


def test_memory_is_that_of_the_keys_that_are_needed_and_is_planned(ranks):
    of_all, of_window = (ranks(2, weighed, x) for x in (sparse.everything, sparse.sliding_window(100)))
    for measured, planned in (*of_all, *of_window):
        assert measured == pytest.approx(planned, rel=0.005)
    saved = of_all[1][0] - of_window[1][0]  # rank 1 gets 1,024 keys of rank 0, or 128; two layers keep them
    assert saved > 2 * (1024 - 128) * GROUPS * 2 * WIDTH * 8


BLOCK = 37


def with_others(what, method, captured):
    """What a rank raises if ranks call attention in different ways."""
    axis = Mesh.make(context=-1).axis("context")
    turned = Chunks(tuple((axis.size - 1 - r,) for r in range(axis.size)))
    options = {
        "windows": {"layout": sparse.sliding_window(40 + axis.rank)},  # in a ring the same blocks travel
        "functions": {"layout": sparse.pattern(lambda head, query, key: key < 40 + axis.rank)},
        "causal": {"causal": bool(axis.rank)},
        "scales, of blocks that go round": {"scale": 1.0 + axis.rank},
        "chunks": {"chunks": turned if axis.rank else Chunks.in_order(axis.size)},
    }[what]
    chunks = (
        {} if "round" in what or method == "ulysses" and what != "chunks" else {"chunks": Chunks.in_order(axis.size)}
    )
    attend = functools.partial(attention, axis=axis, method=method, **{**chunks, **options})
    step = step_with(loss_with(lambda q, k, v, x: attend(q, k, v)))
    batch = {**batches()[0], "rows": torch.full((1, 222, WIDTH), 1.0 + axis.rank, dtype=torch.float64)}
    with pytest.raises(RuntimeError) as caught:
        (zerofn.compile(step) if captured else step)(zerofn.shard(init_state, mesh=Mesh.make(context=-1)), batch)
    return str(caught.value)


@pytest.mark.part(what=["windows", "chunks", "scales, of blocks that go round"])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("what", "method"),
    [
        *((what, "ring") for what in ("windows", "functions", "causal", "scales, of blocks that go round")),
        *((what, "ulysses") for what in ("windows", "functions", "causal", "chunks")),
    ],
)
def test_ranks_that_attend_in_different_ways_are_told(ranks, what, method, captured):
    told = ranks(2, with_others, what, method, captured)
    assert all("attention(" in text for text in told), told
    ranks.stop()  # its group is gone


def recomputed(options):
    """(loss, planned peak)"""
    mesh = Mesh.make(context=-1)
    step, batch = in_a_ring(mesh)
    state, compiled = zerofn.shard(init_state, mesh=mesh, stage=3), zerofn.compile(step, **options)
    for _ in range(2):
        state, loss = compiled(state, batch)
    return loss.item(), compiled.lower(state, batch).memory().total


@pytest.mark.whole
def test_a_step_within_a_budget_has_the_same_bits(ranks):
    kept, again = (ranks(2, recomputed, options) for options in ({}, {"remat": "full"}))
    memory = (max(peak for _, peak in kept) + max(peak for _, peak in again)) // 2
    within = ranks(2, recomputed, {"memory": memory})
    assert [x for x, _ in kept] == [x for x, _ in again] == [x for x, _ in within]
    assert max(peak for _, peak in within) <= memory < max(peak for _, peak in kept)


def with_chosen_blocks(index):
    mesh = Mesh.make(context=-1)
    axis = mesh.axis("context")
    parts = [Chunks.early_and_late(axis.size).part(x, axis.rank, 2).requires_grad_() for x in whole(4, 2)]
    out = attention(*parts, axis=axis, layout=sparse.chosen(index, BLOCK))
    return out.detach(), *torch.autograd.grad(out.sin().sum(), parts)


def test_ranks_that_share_heads_attend_to_blocks_that_are_chosen(ranks):
    index = torch.randint(0, 12, (2, 4, 12, 3), generator=torch.Generator().manual_seed(2))
    leaves = [x.requires_grad_() for x in whole(4, 2)]
    out = sparse.attention(*leaves, sparse.chosen(index, BLOCK), is_causal=True)
    every = out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)
    for rank, found in enumerate(ranks(2, with_chosen_blocks, index)):
        for mine, whole_of_it in zip(found, every, strict=True):
            part = Chunks.early_and_late(2).part(whole_of_it, rank, 2)
            torch.testing.assert_close(mine, part, rtol=0, atol=1e-13)


def with_a_setting_that_changes(method):
    axis = Mesh.make(context=-1).axis("context")
    attend, settings = functools.partial(attention, axis=axis, method=method), {"window": 1}
    near = sparse.pattern(lambda head, query, key: (query - key).abs() < settings["window"])
    parts = [Chunks.early_and_late(axis.size).part(x, axis.rank, 2) for x in whole(4, 2)]
    step = zerofn.compile(lambda _, parts: attend(*parts, layout=near))
    for window in (20, 200, 90):
        settings["window"] = window
        expected = attend(*parts, layout=sparse.sliding_window(window))
        for captured, found in ((False, attend(*parts, layout=near)), (True, step(None, parts))):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14, msg=f"{window=} {captured=}")


@pytest.mark.part(method=["ring"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_function_that_reads_another_value_is_evaluated_again(ranks, method):
    ranks(2, with_a_setting_that_changes, method)
