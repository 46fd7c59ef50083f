"""Masks of attention are recognised by value, and what torch is called with instead has the mask's bits."""

import contextlib

import pytest
import torch
import transformers as hf
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import zerofn
from tests.support.masked_attention import LENGTH, checkpointed, heads, loss_with, masked_batch
from tests.support.same import assert_same_trees
from tests.support.small_steps import build, state_of, step_with
from zerofn import optim, tree
from zerofn._torch_compat import FakeTensorMode, make_fx
from zerofn.capture import capture, known_values
from zerofn.capture.attention_masks import Shape, masks_recognised, shape_of
from zerofn.graph.liveness import blocks
from zerofn.util.nested_arguments import tensors_in

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default
MIN = torch.finfo(torch.float32).min


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def lower(n=LENGTH):
    return ones(n, n).tril()


def banded(width, n=LENGTH):
    """Each token looks at `width` tokens up to itself."""
    place = torch.arange(n)
    return (place[None] <= place[:, None]) & (place[None] > place[:, None] - width)


def blockwise(n=LENGTH):
    """Two sequences in a row."""
    number = torch.arange(n) // (n // 2)
    return lower(n) & (number[:, None] == number[None])


# ---- what a value says


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (ones(5, 7), Shape(False, True)),
        (ones(5, 5), Shape(False, True)),
        (lower(5), Shape(True, True, 5)),
        (lower(5).expand(2, 3, 5, 5), Shape(True, True, 5)),
        (lower(5).repeat(2, 3, 1, 1), Shape(True, True, 5)),
        (ones(5, 7).tril(), Shape(False, False)),  # torch's triangles begin at the upper left, and others at the end
        (banded(3, 5), Shape(True, False, 3)),
        (banded(1, 5), Shape(True, False, 1)),
        (blockwise(6), Shape(True, False)),
        (lower(5).t(), Shape(False, False)),
        (torch.zeros(5, 5).masked_fill(~lower(5), float("-inf")), Shape(True, True, 5)),
        (torch.zeros(5, 5).masked_fill(~lower(5), MIN), Shape(True, True, 5)),
        (torch.zeros(5, 5), Shape(False, True)),
        (torch.zeros(5, 5).masked_fill(~lower(5), -1e9), None),
        (torch.rand(5, 5), None),
        (torch.stack([lower(5), ones(5, 5)])[:, None], None),
        (torch.stack([lower(5), ones(5, 5)])[None], None),
    ],
)
def test_the_shape_of_a_mask(mask, shape):
    assert shape_of(mask) == shape


# ---- what attention is called with


def padding(batch, left=False):
    """[B, 1, 1, L] of the batch: of the second row, some tokens hide."""
    kept = batch["x"][:, :, 0] == batch["x"][:, :, 0]
    hidden = torch.arange(LENGTH) < 4 if left else torch.arange(LENGTH) >= 9
    return (kept & ~(hidden & (batch["rows"] > 0)[:, None]))[:, None, None]


def additive(mask, least=float("-inf")):
    return torch.zeros(mask.shape).masked_fill(~mask, least)


NONE, TRIANGLE = (None, False), (None, True)
MASKS = {  # name -> (the mask of a batch, the kernel's mask and whether it is told of a triangle)
    "none": (lambda b: None, NONE),
    "ones": (lambda b: ones(LENGTH, LENGTH), NONE),
    "zeros to add": (lambda b: torch.zeros(2, 1, LENGTH, LENGTH), NONE),
    "triangle": (lambda b: lower(), TRIANGLE),
    "triangle of numbers": (lambda b: additive(lower())[None, None], TRIANGLE),
    "triangle of the least number": (lambda b: additive(lower(), MIN)[None, None], TRIANGLE),
    "triangle for each row": (lambda b: lower().expand(len(b["x"]), 1, -1, -1), TRIANGLE),
    "triangle in place": (lambda b: torch.empty(LENGTH, LENGTH).fill_(float("-inf")).triu_(1), TRIANGLE),
    "window": (lambda b: banded(5), ((LENGTH, LENGTH), True)),
    "window for each row": (lambda b: banded(5).repeat(2, 4, 1, 1), ((1, 1, LENGTH, LENGTH), True)),
    "blocks": (lambda b: blockwise().expand(2, 1, -1, -1), ((1, 1, LENGTH, LENGTH), True)),
    "band of an encoder": (lambda b: (banded(3) | banded(3).t()).repeat(2, 1, 1, 1), ((1, 1, LENGTH, LENGTH), False)),
    "triangle and padding": (lambda b: lower() & padding(b), ((2, 1, 1, LENGTH), True)),
    "triangle and padding on the left": (lambda b: padding(b, left=True) & lower(), ((2, 1, 1, LENGTH), True)),
    "padding twice": (
        lambda b: (padding(b) & lower() & padding(b, left=True)).expand(2, 4, -1, -1),
        ((2, 1, 1, LENGTH), True),
    ),
    "padding": (lambda b: padding(b).expand(-1, 1, LENGTH, -1), ((2, 1, 1, LENGTH), False)),
    "window and padding": (lambda b: banded(5) & padding(b), ((2, 1, LENGTH, LENGTH), True)),
    "triangle and what depends on data": (lambda b: lower() & b["mask"], ((2, 1, LENGTH, LENGTH), True)),
    "what depends on data": (lambda b: b["mask"], ((2, 1, LENGTH, LENGTH), False)),
    "numbers that depend on data": (lambda b: additive(b["mask"]), ((2, 1, LENGTH, LENGTH), False)),
    "other numbers": (lambda b: torch.arange(LENGTH).float().expand(LENGTH, -1), ((LENGTH, LENGTH), False)),
    "whole numbers": (lambda b: torch.logical_and(lower(), padding(b).long()), ((2, 1, LENGTH, LENGTH), False)),
    "triangle in some rows": (
        lambda b: (lower() & (b["rows"] > 0)[:, None, None, None]) | torch.eye(LENGTH, dtype=torch.bool),
        ((2, 1, LENGTH, LENGTH), False),
    ),
    "padding that was written to": (lambda b: written(lower() & padding(b)), ((2, 1, LENGTH, LENGTH), False)),
}


def written(mask):
    mask[:, :, 3, 7] = True
    return mask


def batch():
    return {**masked_batch(), "rows": torch.arange(2)}


def run_steps(step, precision=None):
    state = state_of(build(), 0, optim.sgd(1.0), precision=precision)
    for _ in range(2):
        state, loss = step(state, batch())
    return loss, tree.leaves(zerofn.unshard(state.params))


def attentions(graph):
    """Of each call of the CPU's kernel: the shape of its mask, and whether it is told of a triangle."""
    calls = [n for n in graph.nodes if n.target is FUSED]
    masks = [n.kwargs.get("attn_mask") for n in calls]
    shapes = [None if m is None else tuple(m.meta["val"].shape) for m in masks]
    return [(shape, len(n.args) > 4 and n.args[4]) for n, shape in zip(calls, shapes, strict=True)]


def graph_of(step, state, batch):
    return zerofn.compile(step).lower(state, batch).graph.graph


@contextlib.contextmanager
def nothing_recognised(patch):
    with patch.context() as inside:
        inside.setattr(capture, "masks_recognised", contextlib.nullcontext())
        yield


SOME = ["none", "triangle of the least number", "window for each row", "band of an encoder", "triangle and padding"]
SOME += ["padding twice", "padding", "whole numbers", "padding that was written to"]


@pytest.mark.part(precision=[None], name=SOME)
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", MASKS)
def test_attention_is_called_with_what_its_mask_stands_for_and_keeps_its_bits(name, precision, monkeypatch):
    mask, expected = MASKS[name]
    step = step_with(loss_with(lambda b: [mask(b)]))
    state = state_of(build(), 0, optim.sgd(1.0), precision=precision)
    assert attentions(graph_of(step, state, batch())) == [expected] * 4
    found = run_steps(zerofn.compile(step), precision)
    assert_same_trees(found, run_steps(step, precision))
    with nothing_recognised(monkeypatch):
        assert_same_trees(found, run_steps(zerofn.compile(step), precision))


@pytest.mark.part(name=["triangle and padding"])
@pytest.mark.parametrize("name", ["triangle", "window", "triangle and padding", "padding"])
def test_where_torch_takes_another_kernel_it_keeps_its_bits(name):
    """Dropout, and a kernel that the user chooses."""
    mask, _ = MASKS[name]
    dropped = step_with(loss_with(lambda b: [mask(b)], dropout_p=0.3))
    assert_same_trees(run_steps(zerofn.compile(dropped)), run_steps(dropped))
    plain = step_with(loss_with(lambda b: [mask(b)]))
    with sdpa_kernel(SDPBackend.MATH):
        assert attentions(graph_of(plain, state_of(build(), 0), batch())) == []
        assert_same_trees(run_steps(zerofn.compile(plain)), run_steps(plain))


def test_a_layer_that_is_recomputed_finds_the_same():
    mask, expected = MASKS["triangle and padding"]
    step = step_with(loss_with(lambda b: [mask(b)], layer=checkpointed))
    assert attentions(graph_of(step, state_of(build(), 0), batch())) == [expected] * 8
    assert_same_trees(run_steps(zerofn.compile(step)), run_steps(step))


def test_keys_of_other_tokens_have_no_triangle():
    def loss_fn(p, b):
        x = torch.nn.functional.linear(b["x"], p["0.weight"], p["0.bias"])
        q, k, mask = heads(x), heads(x.sin()[:, :8]), ones(LENGTH, 8)
        attend = torch.nn.functional.scaled_dot_product_attention
        return (attend(q, k, k, mask) + attend(q, k, k, mask.tril())).square().sum()

    step = step_with(loss_fn)
    assert attentions(graph_of(step, state_of(build(), 0), batch())) == [NONE, ((LENGTH, 8), False)]
    assert_same_trees(run_steps(zerofn.compile(step)), run_steps(step))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_under_transforms_of_functions_masks_stay():
    def loss_fn(p, b):
        x = heads(torch.nn.functional.linear(b["x"], p["0.weight"], p["0.bias"]))
        attend = torch.nn.functional.scaled_dot_product_attention
        return torch.vmap(lambda one: attend(one[None], one[None], one[None], lower()))(x).square().sum()

    step = step_with(loss_fn)
    assert_same_trees(run_steps(zerofn.compile(step)), run_steps(step))


def test_large_masks_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(known_values, "MOST", LENGTH * LENGTH - 1)
    step = step_with(loss_with(lambda b: [lower()]))
    assert attentions(graph_of(step, state_of(build(), 0), batch())) == [((LENGTH, LENGTH), False)] * 4


def test_torchs_own_layers_take_no_mask():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    params = dict(layer.named_parameters())

    def step(state, b):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        loss, grads = zerofn.value_and_grad(lambda p: functional_call(layer, p, (b["x"], mask)).square().sum())(state)
        return {k: x - 0.1 * grads[k] for k, x in state.items()}, loss

    assert attentions(graph_of(step, params, batch())) == [TRIANGLE]
    assert_same_trees(zerofn.compile(step, donate=False)(params, batch()), step(params, batch()))


def test_torch_is_left_as_it_was():
    before = torch.nn.functional.scaled_dot_product_attention
    with masks_recognised:
        assert torch.nn.functional.scaled_dot_product_attention is not before
    assert torch.nn.functional.scaled_dot_product_attention is before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_has_the_bits_of_the_mask_where_it_goes_block_by_block(dtype):
    length, draw = 600, torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(2, length, 2, 16, generator=draw).to(dtype).transpose(1, 2) for _ in range(4))
    keys = torch.rand(2, 1, 1, length, generator=draw) > 0.3
    window = banded(100, length)

    def results(mask, causal):
        mask = None if mask is None else additive(mask).to(dtype)
        out, sums = FUSED(q, k, v, 0.0, causal, attn_mask=mask)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return out, *backward(grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask)

    assert_same_trees(results(None, True), results(lower(length), False))
    assert_same_trees(results(keys, True), results(lower(length) & keys, False), equal_nan=True)
    assert_same_trees(results(window, True), results(window, False))
    assert_same_trees(results(keys, False), results(keys.expand(-1, 1, length, -1), False))


# ---- models of transformers

L = 13
TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
GROUPED = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=5)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT, **NO_DROPOUT)),
    "bert that drops": lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)),
}
PADDED = {"attention_mask": torch.ones(2, L, dtype=torch.long).index_fill_(1, torch.arange(9, L), 0)}
PADDED["attention_mask"][0] = 1
PACKED = {"position_ids": torch.cat([torch.arange(8), torch.arange(L - 8)]).expand(2, -1)}
TEXTS = {  # name -> (model, more of the batch, what the kernel is called with, how many masks a step saves)
    "window": ("mistral", {}, ((1, 1, L, L), True), 1),
    "window and padding": ("mistral", PADDED, ((2, 1, L, L), True), 1),
    "triangle and padding": ("llama", PADDED, ((2, 1, 1, L), True), 0),
    "packed rows": ("llama", PACKED, ((2, 1, L, L), False), 1),
    "padding": ("bert", PADDED, ((2, 1, 1, L), False), 0),
    "padding and dropout": ("bert that drops", PADDED, None, 0),
}


def trained(name, compiled, stage=3, budget=False):
    """The loss and the parameters of two steps, and the graph."""
    model_name, more, _, _ = TEXTS[name]
    torch.manual_seed(0)
    start = {k: v.detach() for k, v in MODELS[model_name]().named_parameters()}
    model = zerofn.skeleton(MODELS[model_name])
    ids = torch.randint(4, 96, (2, L), generator=torch.Generator().manual_seed(7))
    given = {"input_ids": ids, "labels": ids, **more}
    step = step_with(lambda p, b: functional_call(model, p, (), b).loss)
    make = lambda: zerofn.shard(lambda: zerofn.TrainState.create(params=start, tx=optim.adamw(1e-2)), stage=stage)  # noqa: E731
    state, graph = make(), None
    if compiled:
        totals = [zerofn.compile(step, remat=x).lower(state, given).memory().total for x in (None, "full")] * budget
        step = zerofn.compile(step, memory=sum(totals) // 2 or None)
        graph = step.lower(state, given).graph.graph
    for _ in range(2):
        state, loss = step(state, given)
    return (loss, tree.leaves(zerofn.unshard(state.params))), graph


def saved_pairs(graph):
    """How many values for each pair of tokens are kept for the backward pass."""
    saved = tensors_in([x.node.meta["val"] for x in blocks(graph) if x.kind == "activations"])
    return sum(tuple(x.shape[-2:]) == (L, L) for x in saved)


@pytest.mark.whole
@pytest.mark.parametrize("options", [{}, {"stage": 0}, {"budget": True}], ids=str)
@pytest.mark.parametrize("name", TEXTS)
def test_a_model_saves_no_mask_or_one_and_has_the_bits_of_the_eager_one(name, options):
    found, graph = trained(name, True, **options)
    assert_same_trees(found, trained(name, False, options.get("stage", 3))[0])
    _, _, expected, num_masks = TEXTS[name]
    assert set(attentions(graph)) == ({expected} if expected else set())
    if expected is not None:
        assert saved_pairs(graph) <= num_masks if "budget" in options else saved_pairs(graph) == num_masks


# ---- CUDA, on a machine without: what is called


ON_CUDA = {  # name -> what is made of a triangle and the keys that rows allow, and whether dropout draws
    "triangle": (lambda lower, keys: lower, 0.0),
    "window": (lambda lower, keys: lower.triu(-4), 0.0),
    "triangle and padding": (lambda lower, keys: lower & keys, 0.0),
    "window and padding": (lambda lower, keys: lower.triu(-4) & keys, 0.0),
    "triangle, dropout": (lambda lower, keys: lower, 0.1),
    "triangle and padding, dropout": (lambda lower, keys: lower & keys, 0.1),
}


def called_on_cuda(name, patch, able=True):
    """How torch is called by fake tensors of a device that is not there: each (function, mask's shape, triangle)."""
    make, dropout = ON_CUDA[name]
    calls = []

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        calls.append(("torch", None if attn_mask is None else tuple(attn_mask.shape), is_causal))
        return q * dropout_p

    def run(x, keys):
        return torch.nn.functional.scaled_dot_product_attention(
            x, x, x, make(keys.new_ones(20, 20).tril(), keys), dropout
        )

    for each in ("flash", "efficient"):
        patch.setattr(torch.backends.cuda, f"can_use_{each}_attention", lambda params: able)
    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    with FakeTensorMode():
        x = torch.empty(2, 4, 20, 16, dtype=torch.bfloat16, device="cuda")
        keys = torch.empty(2, 1, 1, 20, dtype=torch.bool, device="cuda")
    with masks_recognised:
        graph = make_fx(run, tracing_mode="fake")(x, keys).graph
    return calls, [n for n in graph.nodes if "attention" in str(n.target)]


def test_on_cuda_a_window_is_flash_attentions(monkeypatch):
    calls, (node,) = called_on_cuda("window", monkeypatch)
    assert not calls and node.target is aten._flash_attention_forward.default
    assert node.args[0].meta["val"].shape == (2, 20, 4, 16) and node.args[5:9] == (20, 20, 0.0, True)
    assert node.kwargs == {"window_size_left": 4, "window_size_right": 0}


def test_on_cuda_padding_is_a_bias_without_memory_beside_a_triangle(monkeypatch):
    calls, (node,) = called_on_cuda("triangle and padding", monkeypatch)
    assert not calls and node.target is aten._scaled_dot_product_efficient_attention.default
    bias = node.args[3].meta["val"]
    assert node.args[4:] == (True, 0.0, True)
    assert bias.shape == (2, 4, 20, 20) and bias.stride() == (32, 0, 0, 1) and bias.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "able", "call"),
    [
        ("triangle", True, ("torch", None, True)),
        ("window", False, ("torch", (20, 20), False)),
        ("triangle and padding", False, ("torch", (2, 1, 20, 20), False)),
        ("window and padding", True, ("torch", (2, 1, 20, 20), False)),
        ("triangle, dropout", True, ("torch", (20, 20), False)),
        ("triangle and padding, dropout", True, ("torch", (2, 1, 20, 20), False)),
    ],
)
def test_on_cuda_other_masks_and_what_is_dropped_stay_torchs(name, able, call, monkeypatch):
    assert called_on_cuda(name, monkeypatch, able) == ([call], [])
