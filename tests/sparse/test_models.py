"""Unmodified models: windows and packed rows of a captured step cost what they attend, and are as with masks, eagerly,
and as each document alone.
"""

import functools

import pytest
import torch
import transformers as hf
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from zerofn import optim, tree
from zerofn.capture import sparse_masks
from zerofn.cost.op_cost import flops
from zerofn.graph.nested import graphs_of

ROWS, LENGTH, WINDOW, VOCAB, STEPS = 2, 267, 40, 64, 2
ENDS = [[50, 51, 130, LENGTH], [1, 2, 64, 128]]  # of documents; the rest of a row is one more
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
MODELS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB,
            n_positions=300,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, **_HEADS)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_SIZES, **_HEADS, sliding_window=WINDOW)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_SIZES, **_HEADS, **_KINDS, sliding_window=WINDOW)),
}
WINDOWS = {"mistral": 2, "gemma3": 1}  # layers


@functools.cache
def model_of(name, dtype=torch.float32):
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).eval()


def positions():
    rows = []
    for ends in ENDS:
        sizes = torch.tensor([0, *ends, LENGTH]).diff()
        rows.append(torch.cat([torch.arange(n) for n in sizes.tolist()]))
    return torch.stack(rows)


def tokens(rows=ROWS, seed=7):
    return torch.randint(1, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def batch_of(kind, rank=0):
    batch = {"input_ids": tokens(seed=7 + rank)}
    if kind == "packed":
        batch["position_ids"] = positions().roll(rank, 0)
    if kind == "padded":
        batch["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [120]])).long()
    return batch


def loss_with(model):
    def loss_fn(params, batch):
        logits = functional_call(model, params, (), dict(batch)).logits
        kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[..., None]
        return (logits.square() * kept).mean() + (logits.sin() * kept).mean()

    return loss_fn


def state_of(name, dtype, stage=0):
    params = {k: x.detach().clone() for k, x in model_of(name, dtype).named_parameters()}
    return zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(1e-2, 0.9)), stage=stage)


def sparse_nodes(plan):
    nodes = [n for gm in graphs_of(plan.graph) for n in gm.graph.nodes if "block_attention" in str(n.target)]
    return [n for n in nodes if "backward" not in str(n.target)]


def trained(name, kind, dtype=torch.float32, stage=0, captured=True, rank=0, **options):
    """Losses, parameters, and how many layers are attention by layouts."""
    state, step = state_of(name, dtype, stage), step_with(loss_with(model_of(name, dtype)))
    losses, num = [], 0
    if captured:
        step = zerofn.compile(step, **options)
        num = len(sparse_nodes(step.lower(state, batch_of(kind, rank))))
    for _ in range(STEPS):
        state, loss = step(state, batch_of(kind, rank))
        losses.append(loss)
    return losses, zerofn.unshard(state.params), num


def close(found, expected, tolerance):
    """Each leaf by its greatest value."""
    for x, y in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(1.0, float(y.detach().abs().max())))


CASES = [
    ("llama", "packed", 2), ("gpt2", "packed", 2), ("mistral", "packed", 2), ("gemma3", "packed", 2),
    ("mistral", "plain", 2), ("gemma3", "plain", 1), ("llama", "plain", 0), ("llama", "padded", 2),
    ("mistral", "padded", 2),
]  # fmt: skip


@pytest.mark.part(name=["llama", "gemma3"], kind=["packed", "plain"])
@pytest.mark.parametrize(("name", "kind", "layers"), CASES)
def test_a_model_costs_what_it_attends_and_is_as_with_its_masks(name, kind, layers):
    losses, params, num = trained(name, kind)
    assert num == layers
    close((losses, params), trained(name, kind, captured=False)[:2], 1e-6)


def test_in_float64_a_model_is_as_with_its_masks():
    found, expected = (trained("gpt2", "packed", torch.float64, captured=x)[:2] for x in (True, False))
    close(found, expected, 1e-12)


def documents():
    """Row, first token, the one behind the last, of each document."""
    places = [(row, [0, *ends, LENGTH]) for row, ends in enumerate(ENDS)]
    return [(row, a, b) for row, ends in places for a, b in zip(ends, ends[1:], strict=False) if b > a]


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("gpt2", torch.float64, 1e-12), ("gpt2", torch.float32, 1e-6), ("llama", torch.float32, 1e-6)],
)
def test_each_document_is_as_it_is_alone(name, dtype, tolerance):
    model = model_of(name, dtype)
    params = {k: x.detach() for k, x in model.named_parameters()}

    def loss_fn(params, batch):
        inputs = {k: batch[k] for k in ("input_ids", "position_ids")}
        logits = functional_call(model, params, (), inputs).logits
        return (logits.square().sum(2) * batch["weights"]).sum(), logits

    vg = zerofn.value_and_grad(loss_fn, has_aux=True)
    step = zerofn.compile(lambda params, batch: {"found": vg(params, batch)})
    for row, a, b in documents():
        weights = torch.zeros(ROWS, LENGTH, dtype=dtype)
        weights[row, a:b] = 1 / (b - a)
        (_, logits), grads = step(params, {**batch_of("packed"), "weights": weights})["found"]
        alone = {"input_ids": tokens()[row : row + 1, a:b], "position_ids": torch.arange(b - a)[None]}
        (_, own), own_grads = vg(params, {**alone, "weights": torch.full((1, b - a), 1 / (b - a), dtype=dtype)})
        close((logits[row, a:b], grads), (own[0], own_grads), tolerance)


def on_ranks(cases):
    rank = zerofn.rank()
    return [trained(*case, rank=rank, **options)[:2] for case, options in cases]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(("gpt2", "packed", torch.float64, 3, True), {})], id="few"),
        pytest.param(
            [
                (("gpt2", "packed", torch.float64, stage, captured), options)
                for stage in range(4)
                for captured, options in ((False, {}), (True, {}), (True, {"remat": "full"}))
            ],
            id="all",
            marks=pytest.mark.whole,
        ),
    ],
)
def test_ranks_are_as_one_with_all_rows(ranks, cases):
    size = 2
    state, loss_fn = state_of("gpt2", torch.float64), loss_with(model_of("gpt2", torch.float64))

    def mean(params, batches):
        return sum(loss_fn(params, batch) for batch in batches) / size

    step = step_with(mean)
    for _ in range(STEPS):
        state, _ = step(state, [batch_of("packed", rank) for rank in range(size)])
    for found in ranks(size, on_ranks, cases):
        for _, params in found:
            close(params, zerofn.unshard(state.params), 1e-12)


def test_recomputing_gives_the_same_bits():
    plainly = trained("llama", "packed")
    assert_same_trees(trained("llama", "packed", remat="full")[:2], plainly[:2])


def test_flops_are_those_of_the_windows_tiles():
    state, step = state_of("mistral", torch.float32), step_with(loss_with(model_of("mistral")))
    (first, _) = sparse_nodes(zerofn.compile(step).lower(state, batch_of("plain")))
    window = zerofn.sparse.sliding_window(WINDOW) & zerofn.sparse.causal
    assert flops(first) == 2 * 2 * 8 * ROWS * 4 * zerofn.sparse.layout(window, LENGTH).computed


# ---- which masks are taken apart

N = 24


def lower():
    return torch.ones(N, N, dtype=torch.bool).tril()


def numbers(batch):
    """Documents of a batch, by counting where they begin."""
    return batch["begins"].cumsum(1)


def pairs(x):
    return (x[:, :, None] == x[:, None])[:, None]


def in_three_dimensions(x):
    return ((x[:, :, None] == x[:, None]) & lower())[:, None]


def packed(batch):
    place = batch["places"]
    number = (torch.diff(place, prepend=place[:, :1] - 1) != 1).cumsum(1)
    return number, place


def positions_of_documents(batch):
    number, place = packed(batch)
    return pairs(number) & (place[:, None, None] <= place[:, None, :, None])


def written(batch):
    mask = pairs(numbers(batch)) & lower()
    mask[:, :, 5, 2] = True
    return mask


def padded_later(batch):
    there = batch["kept"].clone()
    mask = there[:, None, None]
    there[:, 3] = False
    return mask


def of_other_positions(batch):
    """Documents end where a second tensor of positions says."""
    number, _ = packed(batch)
    place = batch["places"].flip(1)
    return (pairs(number) & (place[:, None, None] <= place[:, None, :, None])) | torch.eye(N, dtype=torch.bool)


def per_head(batch):
    place = torch.arange(N)
    far = torch.tensor([3, 5, 8, 24])[:, None, None]
    return (place[:, None] - place).abs() < far


IN_PARTS = {
    "window": lambda b: lower().triu(-5),
    "window of each head": per_head,
    "band of an encoder": lambda b: (torch.arange(N)[:, None] - torch.arange(N)).abs() < 4,
    "numbers to add": lambda b: torch.zeros(N, N, dtype=torch.float64).masked_fill(~lower().triu(-5), float("-inf")),
    "documents": lambda b: pairs(numbers(b)),
    "documents and a triangle": lambda b: pairs(numbers(b)) & lower(),
    "documents and a window of each head": lambda b: pairs(numbers(b)) & per_head(b),
    "documents in three dimensions": lambda b: in_three_dimensions(numbers(b)),
    "documents of whole numbers": lambda b: lower() & pairs(b["begins"].int().cumsum(1)),
    "documents, by indices": lambda b: by_indices(numbers(b)),
    "documents of all rows": lambda b: pairs(b["begins"][:1].cumsum(1)) & lower(),
    "positions": positions_of_documents,
    "padding": lambda b: b["kept"][:, None, None],
    "padding, spread": lambda b: b["kept"][:, None, None].expand(2, 1, N, N) & lower(),
    "padding and a triangle": lambda b: lower() & b["kept"][:, None, None],
    "padding on the left, and a window": lambda b: lower().triu(-5) & b["kept"].flip(1)[:, None, None],
    "padding in one row": lambda b: b["kept"][:, None, None].expand(2, 1, 1, N),
    "a constant row": lambda b: torch.arange(N)[None] % 5 > 0,
    "a constant row, and padding": lambda b: (torch.arange(N) % 5 > 0)[None, None, None] & b["kept"][:, None, None],
    "padding and documents": lambda b: pairs(numbers(b)) & b["kept"][:, None, None] & lower(),
}
AS_THEY_ARE = {
    "numbers of a batch": lambda b: pairs(b["numbers"]) & lower(),
    "counts that fall": lambda b: pairs(b["numbers"].cumsum(1)) & lower(),
    "counts along rows": lambda b: pairs(b["begins"].cumsum(0)) | torch.eye(N, dtype=torch.bool),
    "two tensors of numbers": lambda b: (
        (numbers(b)[:, None, :, None] == b["numbers"].cumsum(1)[:, None, None]) | torch.eye(N, dtype=torch.bool)
    ),
    "other positions": of_other_positions,
    "of another row": lambda b: pairs(numbers(b).flip(1)) & lower(),
    "written to": written,
    "any": lambda b: b["any"],
    "padding of a tensor that is written to": padded_later,
    "numbers of padding": lambda b: torch.zeros(2, 1, 1, N).double().masked_fill(~b["kept"][:, None, None], -1e9),
    "a query without a key": lambda b: lower().tril(-1),
}


def by_indices(number):
    row, place = torch.arange(2)[:, None, None, None], torch.arange(N)
    queries, keys = place[None, None, :, None], place[None, None, None]
    return (number[row, queries] == number[row, keys]) & (keys <= queries)


def masked_batch():
    draw = torch.Generator().manual_seed(5)
    begins = torch.rand(2, N, generator=draw) < 0.2
    places = torch.cat([torch.arange(7), torch.arange(9), torch.arange(N - 16)])
    return {
        "x": torch.randn(2, 4, N, 8, generator=draw, dtype=torch.float64),
        "begins": begins,
        "numbers": torch.randint(-1, 3, (2, N), generator=draw),
        "places": torch.stack([places, torch.arange(N)]),
        "any": (torch.rand(2, 1, N, N, generator=draw) < 0.5) | torch.eye(N, dtype=torch.bool),
        "kept": torch.arange(N) < torch.tensor([[N], [9]]),
    }


def step_of(mask):
    def loss_fn(w, batch):
        q, k, v = (batch["x"] * x for x in w.unbind(0))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, mask(batch)).nan_to_num().square().sum()

    return lambda w, batch: {"found": zerofn.value_and_grad(loss_fn)(w, batch)}


@pytest.mark.part(
    name=["window of each head", "documents, by indices", "positions", "written to", "numbers of a batch"]
)
@pytest.mark.parametrize("name", [*IN_PARTS, *AS_THEY_ARE])
def test_masks_are_taken_apart_where_it_is_known_what_they_allow(name, monkeypatch):
    monkeypatch.setattr(sparse_masks, "_SHORT", 0)
    monkeypatch.setattr(sparse_masks, "_SHARE", 10.0)
    step = step_of({**IN_PARTS, **AS_THEY_ARE}[name])
    w = torch.linspace(0.5, 1.5, 24, dtype=torch.float64).view(3, 1, 8)
    compiled = zerofn.compile(step)
    assert len(sparse_nodes(compiled.lower(w, masked_batch()))) == (name in IN_PARTS)
    close(compiled(w, masked_batch()), step(w, masked_batch()), 1e-12)


def test_a_window_and_documents_of_long_rows_are_known_without_a_square():
    length = 40_000  # a mask of it has more elements than a value that is looked at

    def loss_fn(w, batch):
        place, row = torch.arange(length), torch.arange(1)[:, None, None, None]
        queries, keys = place[None, None, :, None], place[None, None, None]
        number, position = packed(batch)
        window = (position[row, keys] <= position[row, queries]) & (position[row, keys] > position[row, queries] - 1024)
        mask = window & (number[row, queries] == number[row, keys])
        x = batch["x"] * w
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask).square().sum()

    batch = {"x": torch.zeros(1, 1, length, 8), "places": torch.arange(length)[None] % 5000}
    step = zerofn.compile(lambda w, batch: {"found": zerofn.value_and_grad(loss_fn)(w, batch)})
    (node,) = sparse_nodes(step.lower(torch.ones(8), batch))
    layout = zerofn.sparse.layout(zerofn.sparse.sliding_window(1024) & zerofn.sparse.causal, length)
    assert flops(node) == 2 * 2 * 8 * layout.computed
