"""Attention by layouts on a GPU, by FlexAttention: its lists of blocks and its function of pairs, read on the CPU by a
few lines of torch and by FlexAttention itself without a compiled kernel; and on a GPU if there is one.
"""

import functools

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch._subclasses import FakeTensorMode

import zerofn
from tests.sparse.dense import attended, inputs, same_as_dense
from tests.sparse.test_attention import EXACT, NAMES, cases, places
from zerofn import sparse
from zerofn.ops import attention_flex, block_attention
from zerofn.ops.attention_keys import Keys
from zerofn.sparse.attention import with_logsumexp

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(params=["read by the test"])
def here(request, monkeypatch):
    """The GPU's path for tensors of the CPU."""
    by = {"read by the test": by_lists, "FlexAttention": attention_flex.attend_by}[request.param]
    monkeypatch.setattr(block_attention, "_by_flex", lambda q: True)
    monkeypatch.setattr(attention_flex, "_compiled", lambda kind, scale: by(scale))
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # has no gradients on the CPU unless compiled


by_both = pytest.mark.parametrize("here", ["read by the test", "FlexAttention"], indirect=True)


def by_lists(scale):
    """What FlexAttention does with a `BlockMask`: all pairs of some blocks, of others those that a function allows."""

    def attend(q, k, v, mask):
        queries, keys = q.shape[2], k.shape[2]
        listed = []
        for num, blocks in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
            among = torch.arange(blocks.shape[-1]) < num[..., None]
            there = torch.zeros(blocks.shape, dtype=torch.bool).scatter_(3, blocks.long(), among)
            there = there.repeat_interleave(128, 2).repeat_interleave(128, 3)
            listed.append(there[:, :, :queries, :keys])
        assert not (listed[0] & listed[1]).any()
        row, head, query, key = torch.meshgrid(*map(torch.arange, (*q.shape[:2], queries, keys)), indexing="ij")
        return attended(q, k, v, listed[1] | listed[0] & mask.mask_mod(row, head, query, key), scale)

    return attend


@pytest.mark.parametrize("num", [1, 128, 257])
@pytest.mark.parametrize("name", NAMES)
def test_patterns_are_their_masks(name, num, here):
    pattern, mask = cases(num)[name]
    same_as_dense(inputs(queries=num), lambda q, k, v: sparse.attention(q, k, v, pattern), mask, EXACT)


def test_a_block_without_a_pair_is_not_computed(here, monkeypatch):
    lists = []
    monkeypatch.setattr(
        attention_flex,
        "_compiled",
        lambda kind, scale: lambda q, k, v, mask: lists.append(mask) or by_lists(scale)(q, k, v, mask),
    )
    q, k, v, _ = (x.detach() for x in inputs(queries=1000))
    sparse.attention(q, k, v, sparse.sliding_window(100) & sparse.causal)
    assert lists[0].kv_num_blocks.tolist() == [[[1] + [2] * 7]] and lists[0].full_kv_num_blocks.sum() == 0
    sparse.attention(q, k, v, sparse.causal)
    assert lists[1].full_kv_num_blocks.tolist() == [[list(range(8))]] and lists[1].kv_num_blocks.tolist() == [[[1] * 8]]


@pytest.mark.parametrize("block, queries", [(64, 64), (16, 16), (48, 100), (200, 128)])
def test_blocks_that_a_step_chooses(block, queries, here):
    num = 390
    given = inputs(queries=num)
    shape = (2, 4, -(-num // queries), 2)
    index = torch.randint(-1, -(-num // block), shape, generator=torch.Generator().manual_seed(3))
    i, j = places(num)
    named = index.repeat_interleave(queries, 2)[:, :, :num]  # [batch, heads, queries, 2]
    mask = (named[..., None] == j // block).any(3) & (j <= i)
    attend = lambda q, k, v: sparse.attention(q, k, v, sparse.chosen(index, block, queries=queries), is_causal=True)  # noqa: E731
    same_as_dense(given, attend, mask, EXACT)


@by_both
def test_documents_and_padding_of_each_row(here):
    num = 300
    given = inputs(queries=num)
    ends, there = torch.tensor([[0, 100, 256, 300], [0, 7, 128, 290]]), torch.rand(2, num) < 0.8
    there[:, 128:256] = False
    i, j = places(num)
    of = torch.searchsorted(ends, torch.arange(num).expand(2, -1).contiguous(), right=True)
    mask = (of[:, :, None] == of[:, None]) & (of < 4)[:, :, None] & there[:, None] & (j <= i)
    layout = sparse.documents(ends) & sparse.padding(there) & sparse.causal
    same_as_dense(given, lambda q, k, v: sparse.attention(q, k, v, layout), mask[:, None], EXACT)


@by_both
def test_the_logarithm_of_sums_and_its_gradient(here, monkeypatch):
    q, k, v, _ = inputs(queries=200)
    found = []
    for by_flex in (True, False):
        monkeypatch.setattr(block_attention, "_by_flex", lambda q, by_flex=by_flex: by_flex)
        out, lse = with_logsumexp(q, k, v, sparse.sliding_window(20) & sparse.causal)
        found.append((out, lse, *torch.autograd.grad((out.sin().sum() + lse.cos().sum()), (q, k, v))))
    torch.testing.assert_close(*found, rtol=0, atol=EXACT)


def test_a_captured_step_takes_the_same_path(here):
    q, k, v = (x.detach() for x in inputs(queries=200)[:3])

    def train_step(state, batch):
        loss, grads = zerofn.value_and_grad(loss_fn)(state["params"], batch)
        return state, (loss, zerofn.gather(grads)["w"])

    def loss_fn(params, batch):
        return sparse.attention(q * params["w"], k, v, sparse.documents(batch["ends"]) & sparse.causal).sin().sum()

    state = {"params": {"w": torch.ones(5, 1, 1, 1, dtype=q.dtype)[0]}}
    batch = {"ends": torch.tensor([[0, 90, 200], [0, 100, 150]])}
    _, plain = train_step(state, batch)
    step = zerofn.compile(train_step)
    torch.testing.assert_close(step(zerofn.shard(lambda: state), batch)[1], plain, rtol=0, atol=EXACT)


@pytest.mark.parametrize("tile, num", [(64, 300), (16, 257), (64, 64)])
def test_pairs_of_blocks_are_counted(tile, num):
    generator = torch.Generator().manual_seed(tile)
    tiles = -(-num // tile)
    attended = torch.rand(2, tiles, tiles, generator=generator) < 0.05
    tokens = attended.repeat_interleave(tile, 1).repeat_interleave(tile, 2)[:, :num, :num]
    pairs = 0
    for query in range(0, num, 128):
        for key in range(0, num, 128):
            block = tokens[:, query : query + 128, key : key + 128]
            pairs += int(block.flatten(1).any(1).sum()) * block[0].numel()
    assert attention_flex.computed(attended, tile, num, num) == pairs


@pytest.mark.parametrize(
    "block_q, block_k, chosen, keys", [(64, 64, 1, 256), (128, 128, 3, 384), (48, 200, 1, 4 * 3 * 128)]
)
def test_keys_of_chosen_blocks_are_counted(block_q, block_k, chosen, keys):
    assert attention_flex.most_keys(chosen, block_q, block_k) == keys


def test_what_a_gpu_does_not_do_is_a_sentence():
    with (
        FakeTensorMode(),
        pytest.raises(TypeError, match="on cuda.*float32, torch.bfloat16, torch.float16; got torch.float64"),
    ):
        sparse.attention(*[torch.empty(1, 2, 8, 16, dtype=torch.float64, device="cuda")] * 3, sparse.causal)
    with FakeTensorMode(), pytest.raises(ValueError, match="dropout=0.1, which is computed on the CPU only"):
        sparse.attention(*[torch.empty(1, 2, 8, 16, device="cuda")] * 3, sparse.causal, dropout=0.1)


def test_what_does_not_exist_is_refused(here):
    q, k, v, _ = (x.detach() for x in inputs(queries=100))
    with pytest.raises(RuntimeError, match="the index names a block beyond -1 to 1"):
        sparse.attention(q, k, v, sparse.chosen(torch.full((1, 1, 2, 1), 7), 64))
    every = Keys(None, None, None, None, torch.full((1, 100, 2), -1), None, 64, 64, False)
    with pytest.raises(RuntimeError, match="a row's cu_seqlens must start at 0, never decrease"):
        attention_flex.forward(q, k, v, every, 1.0)


@pytest.mark.whole
def test_torch_traces_it_once_for_all_lengths(monkeypatch):
    """All that `torch.compile` does but for the kernel, forwards and backwards."""
    compiled, whole = [], torch.compile

    def without_kernel(attend, **options):
        compiled.append(attend)
        return whole(attend, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", without_kernel)
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(attention_flex, "_compiled", functools.cache(attention_flex._compiled.__wrapped__))
    for num in (200, 300, 77):
        *qkv, grad = inputs(queries=num)
        index = torch.randint(-1, -(-num // 64), (2, 4, -(-num // 64), 2))
        ends = torch.tensor([[0, 40, num], [0, 10, num - 3]])
        window = sparse.sliding_window(20) & sparse.causal
        for layout in (window, sparse.documents(ends) & sparse.causal, sparse.chosen(index, 64)):
            found = []
            for by_flex in (True, False):
                monkeypatch.setattr(block_attention, "_by_flex", lambda q, by_flex=by_flex: by_flex)
                out = sparse.attention(*qkv, layout)
                found.append((out, *torch.autograd.grad(out, qkv, grad)))
            torch.testing.assert_close(*found, rtol=0, atol=EXACT)
    assert len(compiled) == 3


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_the_kernel_that_torch_compiles_for_the_cpu(monkeypatch):
    def attend_by(scale):  # torch has no logarithms of sums there
        attend = functools.partial(flex.flex_attention, scale=scale, enable_gqa=True)
        return lambda q, k, v, mask: (attend(q, k, v, block_mask=mask), q.new_zeros(q.shape[:3]))

    monkeypatch.setattr(attention_flex, "attend_by", attend_by)
    monkeypatch.setattr(block_attention, "_by_flex", lambda q: True)
    q, k, v = (x.detach().float() for x in inputs(queries=200)[:3])
    pattern = cases(200)["sinks"][0]
    attend = lambda q: sparse.attention(q, k, v, pattern)  # noqa: E731
    found = attend(q), torch.func.vjp(attend, q)[0]
    monkeypatch.undo()
    torch.testing.assert_close(found, (attend(q),) * 2, rtol=0, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_does_the_same(name, dtype, tolerance):
    pattern, mask = cases(257)[name]
    *qkv, grad = (x.detach().cuda().to(dtype) for x in inputs(queries=257))
    same_as_dense(
        (*(x.requires_grad_() for x in qkv), grad),
        lambda q, k, v: sparse.attention(q, k, v, pattern),
        mask.cuda(),
        tolerance,
    )
