"""`sparse.use`: attention of a whole model by a layout, and what is refused."""

import copy
import inspect
import pickle

import pytest
import torch
import transformers as hf
from torch import nn
from torch.func import functional_call

import zerofn
from tests.sparse.test_models import LENGTH, MODELS, VOCAB, close, sparse_nodes, tokens
from tests.support.small_steps import step_with
from zerofn import optim, sparse
from zerofn.sparse.patterns import Sizes
from zerofn.sparse.use import in_use

PATTERN = (sparse.sliding_window(30) | sparse.sinks(3)) & sparse.causal


def llama(**more):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, **more)).eval()


def masked(pattern=PATTERN, length=LENGTH):
    place = torch.arange(length)
    return pattern.allowed(torch.zeros(1, dtype=torch.long), place[:, None], place, Sizes(1, length, length))


def with_masks(model, batch, layers=range(3)):
    """A model's logits with a mask that the user gives, in some layers."""
    whole, kept = masked()[None, None], list(model.model.layers)
    for number, layer in enumerate(kept):
        if number in layers:
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: (args, {**kwargs, "attention_mask": whole}), with_kwargs=True
            )
    return model(**batch).logits


@pytest.mark.parametrize("layers", [None, [0, 2]])
def test_a_model_goes_by_a_layout(layers):
    batch = {"input_ids": tokens()}
    expected = with_masks(llama(), batch, range(3) if layers is None else layers)
    model = sparse.use(llama(), PATTERN, layers=layers)
    close(model(**batch).logits, expected, 1e-6)
    assert list(inspect.signature(model.model.layers[0].self_attn.forward).parameters)[0] == "hidden_states"


def test_a_captured_step_and_recomputed_layers_go_by_it():
    model, batch = sparse.use(llama(), PATTERN), {"input_ids": tokens()}
    step = step_with(lambda p, b: functional_call(model, p, (), dict(b)).logits.square().mean())

    def make():
        params = {k: x.detach().clone() for k, x in model.named_parameters()}
        return zerofn.TrainState.create(params=params, tx=optim.sgd(0.1))

    eager = step(make(), batch)
    for options in ({}, {"remat": "full"}):
        compiled = zerofn.compile(step, **options)
        assert len(sparse_nodes(compiled.lower(make(), batch))) == (6 if options else 3)
        found = compiled(make(), batch)
        close((found[0].params, found[1]), (eager[0].params, eager[1]), 1e-6)
    model.activation_checkpointing_enable()
    model.train()
    found = step(make(), batch)
    close((found[0].params, found[1]), (eager[0].params, eager[1]), 1e-6)


def test_a_step_follows_another_layout():
    model, batch = sparse.use(llama(), PATTERN), {"input_ids": tokens()}
    step = zerofn.compile(lambda p, b: {"logits": functional_call(model, p, (), dict(b)).logits})
    params = {k: x.detach() for k, x in model.named_parameters()}
    first = step(params, batch)["logits"]
    sparse.use(model, None)
    second = step(params, batch)["logits"]
    close(second, llama()(**batch).logits, 1e-6)
    assert not torch.allclose(first, second, atol=1e-4)


def test_a_layout_of_the_steps_batch():
    model, ends = llama(), torch.tensor([[0, 60, LENGTH], [0, 100, LENGTH]])
    batch = {"input_ids": tokens(), "ends": ends}

    def step(params, batch):
        sparse.use(model, sparse.documents(batch["ends"]))
        return {"logits": functional_call(model, params, (), {"input_ids": batch["input_ids"]}).logits}

    params = {k: x.detach() for k, x in model.named_parameters()}
    places = torch.stack([torch.cat([torch.arange(n) for n in row.diff().tolist()]) for row in ends])
    # Rotations are relative: positions that start again change nothing inside of a document.
    expected = llama()(input_ids=tokens(), position_ids=places).logits
    for run in (zerofn.compile(step), step):
        close(run(params, batch)["logits"], expected, 1e-5)


def test_torchs_own_attention_and_copies():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, LENGTH, 16)
    expected = layer(x, x, x, need_weights=False, attn_mask=~masked())[0]
    sparse.use(layer, PATTERN)
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        close(each(x, x, x, need_weights=False)[0], expected, 1e-6)
    other = copy.deepcopy(layer)
    plain = sparse.use(layer, None)(x, x, x, need_weights=False)[0]
    close(other(x, x, x, need_weights=False)[0], expected, 1e-6)
    assert "forward" not in vars(layer) and not torch.allclose(plain, expected, atol=1e-3)


def test_a_triangle_beside_a_layout_is_is_causal():
    layer = sparse.use(nn.MultiheadAttention(16, 4, batch_first=True), sparse.sliding_window(9))
    x, triangle = torch.randn(1, 50, 16), nn.Transformer.generate_square_subsequent_mask(50)
    found = layer(x, x, x, need_weights=False, attn_mask=triangle)[0]
    close(found, sparse.use(layer, sparse.sliding_window(9) & sparse.causal)(x, x, x, need_weights=False)[0], 1e-6)
    sparse.use(layer, sparse.sliding_window(9))
    options = {"need_weights": False, "attn_mask": triangle}
    step = zerofn.compile(lambda p, b: {"out": functional_call(layer, p, (b["x"],) * 3, options)[0]})
    close(step({k: p.detach() for k, p in layer.named_parameters()}, {"x": x})["out"], found, 1e-6)


def padded():
    return {"input_ids": tokens(), "attention_mask": (torch.arange(LENGTH) < torch.tensor([[LENGTH], [90]])).long()}


REFUSED = {
    "padding": (lambda: (llama(), padded()), r"layer 'model.layers.0.self_attn' \(LlamaAttention\) received a mask"),
    "a window": (lambda: (MODELS["mistral"](), {"input_ids": tokens()}), "without a sliding window"),
    "eager attention": (
        lambda: (llama(attn_implementation="eager"), {"input_ids": tokens()}),
        "does not compute attention by",
    ),
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layout_would_not_be_true_of_is_refused(name, captured):
    make, sentence = REFUSED[name]
    model, batch = make()
    sparse.use(model, PATTERN)
    run = lambda p, b: {"logits": functional_call(model, p, (), dict(b)).logits}  # noqa: E731
    params = {k: x.detach() for k, x in model.named_parameters()}
    with pytest.raises(ValueError, match=sentence):
        (zerofn.compile(run) if captured else run)(params, batch)
    x = torch.randn(1, 1, 5, 4)
    nn.functional.scaled_dot_product_attention(x, x, x)  # torch is as it was
    assert not in_use()


def test_cross_attention_is_refused_for_rows_of_equal_length():
    layer, x = sparse.use(nn.TransformerDecoderLayer(16, 4, batch_first=True), PATTERN), torch.randn(1, 50, 16)
    with pytest.raises(ValueError, match=r"layer 'multihead_attn'.* \(cross attention\).*Leave this layer out"):
        layer(x, x.clone())
    layer = sparse.use(nn.TransformerDecoderLayer(16, 4, batch_first=True), PATTERN, layers=[0])
    assert layer(x, x.clone()).shape == x.shape


def test_torchs_fast_path_is_left():
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True).eval(), torch.randn(1, 50, 16)
    dense = layer(x)
    sparse.use(layer, PATTERN)
    expected = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
        assert not torch.allclose(expected, dense)
        torch.testing.assert_close(sparse.use(layer, None)(x), dense)
    assert not layer.self_attn._forward_pre_hooks


def test_mistakes_are_sentences():
    with pytest.raises(ValueError, match="no layer of Linear calls"):
        sparse.use(nn.Linear(2, 2), PATTERN)
    with pytest.raises(
        ValueError, match="attention layer 3 does not exist; LlamaForCausalLM has 3 attention layers, from 0 to 2"
    ):
        sparse.use(llama(), PATTERN, layers=[3])
    with pytest.raises(ValueError, match="layers is empty, so no layer would change"):
        sparse.use(llama(), PATTERN, layers=[])
    with pytest.raises(TypeError, match="layout must be a pattern"):
        sparse.use(llama(), 3)
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(1, 50, 16)
    with pytest.raises(ValueError, match="cross attention"):
        sparse.use(layer, PATTERN)(x, x[:, :40], x[:, :40], need_weights=False)
    with pytest.raises(ValueError, match="the layout was made for 3 heads"):
        draws = sparse.layout(sparse.pattern(lambda h, q, k: (k - q).abs() < h + 2), 50, heads=3)
        sparse.use(layer, draws)(x, x, x, need_weights=False)


@pytest.mark.parametrize("in_the_step", [False, True])
def test_a_layout_is_watched_and_is_no_side_effect_of_a_step(in_the_step, caplog):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    params, x = {name: p.detach() for name, p in layer.named_parameters()}, torch.randn(1, 100, 16)

    def forward(p, batch):
        if in_the_step:
            sparse.use(layer, sparse.documents(batch["ends"]) & sparse.causal)
        return {"out": functional_call(layer, p, (batch["x"],) * 3, {"need_weights": False})[0]}

    step = zerofn.compile(forward)
    with caplog.at_level("INFO", "zerofn"):
        for end in (40, 70):
            batch = {"x": x, "ends": torch.tensor([0, end, 100])}
            if not in_the_step:
                sparse.use(layer, sparse.documents(batch["ends"]) & sparse.causal)
            found = step(params, batch)["out"]
            close(found, forward(params, batch)["out"], 1e-6)
    assert "frozen" not in caplog.text and "writes" not in caplog.text, caplog.text
    assert caplog.text.count(": captured") == (1 if in_the_step else 2), caplog.text
