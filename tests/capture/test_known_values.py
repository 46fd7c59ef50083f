"""What depends on no input has its value at capture, and libraries that look at it decide as they do eagerly."""

import contextlib

import pytest
import torch
import transformers as hf
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from zerofn import optim
from zerofn.capture import capture as capturing
from zerofn.capture import known_values
from zerofn.capture.capture import CaptureError, capture

LENGTH = 13
FLAG = torch.tensor([1.0, 2.0])


def state():
    return {"p": torch.ones(2)}


def batch():
    return {"x": torch.arange(1.0, 4.0)}


# ---- what is known: numbers that a step asks for


def of_comparisons(x):
    return int(((torch.arange(3) - 1).cumsum(0).diff() > 0).all()) + bool(torch.zeros(2).any())


def of_python(x):
    return sum(torch.arange(2, 5).tolist()) + torch.full((2,), 3).view(2, 1).expand(2, 2).sum().item()


def of_pairs(x):
    return 2 * torch.equal(torch.ones(3), torch.arange(3) ** 0) + torch.allclose(x.new_ones(3), torch.zeros_like(x))


def of_shapes(x):
    mask = torch.ones_like(x, dtype=torch.bool)
    return bool(mask.all()) + x.new_full((2, 2), 3).sum().item() + torch.zeros_like(x).numel()


def of_writes(x):
    m = torch.zeros(3)
    before = m + 1
    m[1:].add_(2)
    m += 1
    asked = m.sum().item()
    m[0] = 7  # after it was asked for
    return 1000 * asked + 100 * m.sum().item() + before.sum().item()


def of_memory_that_is_filled(x):
    causal = torch.empty(4, 4).fill_(float("-inf")).triu_(1)
    return int(causal.isinf().sum()) + torch.empty(2).copy_(torch.arange(2)).sum().item()


def of_views_that_are_written(x):
    m = torch.arange(4)
    row = m.view(2, 2)[1]
    asked = int(m.sum())
    m.mul_(2)
    return 10 * asked + int(row.sum())


def of_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return float(torch.full((1, 1), 1.0009765625).mm(torch.ones(1, 1)))


def of_its_closure(x):
    return int(FLAG.sum())


KNOWN = [v for k, v in list(globals().items()) if k.startswith("of_")]


@pytest.mark.parametrize("number", KNOWN, ids=lambda f: f.__name__)
def test_a_step_may_ask_for_what_depends_on_no_input(number):
    def step(state, batch):
        return {"y": batch["x"] * number(batch["x"])}

    assert_same_trees(zerofn.compile(step)(state(), batch()), step(state(), batch()))


def test_a_closed_over_value_that_changes_is_another_capture(monkeypatch):
    step = zerofn.compile(lambda s, b: b["x"] * of_its_closure(b["x"]))
    assert step(state(), batch())[0] == 3
    monkeypatch.setitem(globals(), "FLAG", torch.tensor([5.0, 2.0]))
    assert step(state(), batch())[0] == 7
    FLAG.zero_()
    assert step(state(), batch())[0] == 0


def test_a_known_value_of_a_transformed_function_is_known():
    def step(state, batch):
        def f(x):
            return (x * (2 if torch.ones(2).all() else 3)).sum()

        return {
            "y": torch.func.grad(f)(batch["x"]),
            "z": torch.vmap(lambda x: x * int(torch.arange(3)[-1]))(batch["x"]),
        }

    assert_same_trees(zerofn.compile(step)(state(), batch()), step(state(), batch()))


# ---- what is not


def with_an_input_in_it(x):
    m = torch.zeros(3)
    m[0] = x[0]
    return m.sum().item()


def of_a_draw(x):
    return torch.rand(2).sum().item()


def of_memory_as_it_came(x):
    return torch.empty(3).isnan().any().item()


@pytest.mark.parametrize("number", [lambda x: x.sum().item(), with_an_input_in_it, of_a_draw, of_memory_as_it_came])
def test_what_an_input_or_a_draw_has_a_part_in_is_not_known(number):
    def step(state, batch):
        with zerofn.random.randomness(zerofn.random.key(0)):
            return {"y": batch["x"] * (2 if number(batch["x"]) else 3)}

    with pytest.raises(CaptureError, match="asks for the value of a tensor"):
        capture(step, state(), batch())


def test_large_values_are_not_computed(monkeypatch):
    monkeypatch.setattr(known_values, "MOST", 100)
    capture(lambda s, b: b["x"] * torch.ones(10, 10).sum().item(), state(), batch())
    with pytest.raises(CaptureError, match="asks for the value"):
        capture(lambda s, b: b["x"] * (1 if torch.ones(10, 11).sum() > 1 else 2), state(), batch())


def test_without_a_trace_nothing_is_known():
    assert known_values.known_value(torch.ones(2)) is None


# ---- what models of transformers decide by what they look at

TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**TEXT, "num_key_value_heads": 2}
LAYERS = ["sliding_attention", "full_attention"]
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
BUILDERS = {
    "llama": lambda **more: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, **more)),
    "qwen2": lambda **more: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED, **more)),
    "mistral": lambda **more: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=64, **more)),
    "mistral, narrow": lambda **more: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=5, **more)),
    "gemma3": lambda **more: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=5, layer_types=LAYERS, **more)
    ),
    "whisper": lambda **more: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=96, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=10,
            max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            **HEADS, **more,
        )
    ),
}  # fmt: skip
PADDED = torch.ones(2, LENGTH, dtype=torch.long).index_fill_(1, torch.arange(9, LENGTH), 0)
PACKED = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)]).expand(2, -1)


def model_batch(name, **more):
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(4, 96, (2, LENGTH), generator=draw)
    own = {"input_features": torch.randn(2, 8, 20, generator=draw)} if name == "whisper" else {"input_ids": ids}
    return {**own, "labels": ids, **more}


def trained(name, batch, compiled, num_microbatches=1, precision=None, checkpointed=False, remat=None, **config):
    """Return the parameters and the last loss of two steps, and the captured graph."""

    def build():
        model = BUILDERS[name](**config)
        if checkpointed:
            model.gradient_checkpointing_enable()
        return model

    torch.manual_seed(0)
    start = {k: v.detach() for k, v in build().named_parameters()}
    model = zerofn.skeleton(build)

    def loss_fn(params, batch):
        return functional_call(model, params, (), batch).loss

    def step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), num_microbatches)(batch)
        return state.apply_gradients(grads), loss

    tx = optim.adamw(1e-2)
    state = zerofn.shard(lambda: zerofn.TrainState.create(params=start, tx=tx), stage=3, precision=precision)
    run = zerofn.compile(step, remat=remat) if compiled else step
    plan = run.lower(state, batch) if compiled else None
    for _ in range(2):
        state, loss = run(state, batch)
    return (zerofn.unshard(state.params), loss), plan


def nodes_of(plan):
    graphs = [m for m in plan.graph.modules() if isinstance(m, torch.fx.GraphModule)]
    return [n for gm in graphs for n in gm.graph.nodes if n.op == "call_function"]


def pairs_of_tokens(plan):
    """The nodes with a value for each pair of tokens."""
    shapes = {n: n.meta["val"].shape for n in nodes_of(plan) if isinstance(n.meta.get("val"), torch.Tensor)}
    return [n for n, shape in shapes.items() if tuple(shape[-2:]) == (LENGTH, LENGTH)]


@pytest.mark.part(name=["mistral, narrow", "whisper"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_captured_model_has_the_bits_and_the_attention_of_the_eager_one(name, monkeypatch):
    asked = []  # masks and heads of keys, in each call of attention
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(q, k, v, attn_mask=None, is_causal=False, **more):
        asked.append((None if attn_mask is None else tuple(attn_mask.shape), is_causal, k.shape[1]))
        return attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(capturing, "masks_recognised", contextlib.nullcontext())
    expected, _ = trained(name, model_batch(name), False, use_cache=False)
    eager, asked[:] = asked[: len(asked) // 2], []
    found, plan = trained(name, model_batch(name), True, use_cache=False)
    assert_same_trees(found, expected)
    assert asked[: len(eager)] == eager
    assert bool(pairs_of_tokens(plan)) == any(mask is not None for mask, _, _ in eager)


@pytest.mark.part(options=[{"use_cache": False, "num_microbatches": 2}])
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False, "remat": "full"},
        {"use_cache": False, "checkpointed": True},
        {"use_cache": False, "num_microbatches": 2},
        {"use_cache": False, "precision": "bf16"},
    ],
    ids=str,
)
def test_no_value_for_each_pair_of_tokens_however_a_decoder_is_trained(options):
    expected, _ = trained("llama", model_batch("llama"), False, **options)
    found, plan = trained("llama", model_batch("llama"), True, **options)
    assert_same_trees(found, expected)
    assert not pairs_of_tokens(plan)


@pytest.mark.part(given=[{"position_ids": PACKED}])
@pytest.mark.parametrize("given", [{"attention_mask": PADDED}, {"position_ids": PACKED}], ids=lambda x: next(iter(x)))
def test_masks_and_positions_of_the_batch_mask_as_they_do_eagerly(given):
    batch = model_batch("llama", **given)
    assert_same_trees(*(trained("llama", batch, compiled, use_cache=False)[0] for compiled in (True, False)))


def test_transformers_is_left_as_it_was():
    import transformers.masking_utils as masking
    from transformers.utils import import_utils

    before = import_utils.is_tracing
    with known_values.values_looked_at:
        assert masking.is_tracing is not before
    assert masking.is_tracing is import_utils.is_tracing is before
