"""Heads and losses in tiles of logits: chosen by a budget, with the bits and the memory of plain torch's step."""

import functools
import itertools
import re
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import zerofn
from tests.support.same import assert_same_trees
from zerofn import optim, passes
from zerofn.capture.capture import capture
from zerofn.graph.nested import graphs_of
from zerofn.graph.program import tensor_of
from zerofn.graph.resident import resident
from zerofn.lowering.inductor import Inductor
from zerofn.ops.registry import base_name
from zerofn.passes.budget.decision import Choice, as_text, from_text
from zerofn.passes.tile_logits import heads_of, tile_logits

VOCABULARY, WIDTH, ROWS, LENGTH = 700, 16, 8, 150  # of two microbatches, each has enough tokens for tiles


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Plain(nn.Module):
    """A head with a bias, and a loss of its own."""

    def __init__(self, cast=torch.float32, **options):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.cast, self.options = cast, options

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.embed(input_ids))).to(self.cast)
        return Output(F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), **self.options), logits)


class Rounded(Plain):
    """Logits that are rounded to bfloat16 before they are cast to float32."""

    def forward(self, input_ids, labels):
        rounded = self.head(torch.tanh(self.embed(input_ids))).bfloat16().float()
        return Output(F.cross_entropy(rounded.view(-1, VOCABULARY), labels.view(-1)), rounded)


def llama():
    import transformers  # takes ranks seconds

    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes))


def gpt2():
    import transformers

    sizes = {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **drops, bos_token_id=0, eos_token_id=0)
    )


def t5():
    import transformers

    sizes = {"d_model": WIDTH, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0, tie_word_embeddings=True)
    )


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # losses of logits that are not cast to float32
UNCAST = {f"uncast {name}": functools.partial(Plain, cast=dtype) for name, dtype in HALF.items()} | {"t5": t5}
MODELS = {"plain": Plain, "llama": llama, "gpt2": gpt2}


def build(name):
    torch.manual_seed(0)
    return (MODELS | UNCAST)[name]()


def batch_of(rank=0):
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(rank))
    labels = ids.clone()
    labels[:, ::5] = -100
    return {"input_ids": ids, "labels": labels}


def step_of(model, num_microbatches=1):
    def train_step(state, batch):
        vg = state.value_and_grad(lambda params, batch: functional_call(model, params, (), batch).loss)
        loss, grads = (zerofn.accumulate(vg, num_microbatches) if num_microbatches > 1 else vg)(batch)
        return state.apply_gradients(grads), loss

    return train_step


def state_of(model, stage, precision=None):
    plain = zerofn.TrainState.create(params=dict(model.named_parameters()), tx=optim.adamw(1e-2, weight_decay=0.1))
    return zerofn.shard(plain, stage=stage, precision=precision)


def trained(name, memory, stage=3, precision=None, num_microbatches=1, **options):
    """(losses and parameters of two steps, operations that have tiles of logits, plan)."""
    model, rank = build(name), torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    state = state_of(model, stage, precision)
    step = zerofn.compile(step_of(model, num_microbatches), memory=memory, **options)
    losses = []
    for _ in range(2):
        state, loss = step(state, batch_of(rank))
        losses.append(loss)
    plan = step.lower(state, batch_of(rank))
    return {"losses": losses, "params": zerofn.unshard(state.params)}, in_tiles(plan.program.gm), plan


def in_tiles(gm):
    """The names of operations that have a tile of logits at a time."""
    targets = [node.target for each in graphs_of(gm) for node in each.graph.nodes]
    return [base_name(x) for x in targets if isinstance(x, torch._ops.OpOverload) and base_name(x).startswith("head_")]


def least(name, **options):
    """What a budget that is too small says would do."""
    with pytest.raises(MemoryError, match="cannot be scheduled within 10 bytes") as error:
        trained(name, 10, **options)
    return int(re.findall(r"[\d,]{4,}", str(error.value))[-1].replace(",", ""))


def at_least_memory(name, **options):
    """What a step has in the least memory that it takes, with logits in tiles: the bits of ample memory, with whole
    ones."""
    expected, none, whole = trained(name, "1TB", **options)
    low = least(name, **options)
    found, some, plan = trained(name, low, **options)
    assert not none and some[:2] == ["head_loss", "head_loss_backward"] and some[2].startswith("head_gradient")
    assert plan.memory().total <= low < whole.memory().total
    assert "logits in tiles: 256 tokens; 256 columns, for the head's gradient" in plan.text()
    assert_same_trees(found, expected, f"{name} {options}")
    return found


def by_torch(name):
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True, weight_decay=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch_of()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "params": {k: v.detach() for k, v in model.named_parameters()}}


@pytest.mark.part(name=["plain", "gpt2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_budget_takes_tiles_with_the_bits_of_plain_torch(name):
    assert_same_trees(at_least_memory(name), by_torch(name), name)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {"precision": "bf16", "num_microbatches": 2}), ("gpt2", {"precision": "bf16"}), ("gpt2", {"stage": 0})],
)
def test_in_half_precision_and_in_loops(name, options):
    at_least_memory(name, **options)


@pytest.mark.part(name=["uncast bf16"])
@pytest.mark.parametrize(
    ("name", "precision"),
    [("uncast bf16", "bf16"), ("uncast fp16", "fp16"), pytest.param("t5", "bf16", marks=pytest.mark.whole)],
)
def test_losses_in_half_precision(name, precision):
    at_least_memory(name, precision=precision)


def on_ranks(name, stages):
    found = [at_least_memory(name, stage=stage) for stage in stages]
    for stage, x in zip(stages, found, strict=True):
        assert_same_trees(x, found[0], f"stage {stage}")


@pytest.mark.part(name=["plain"])
@pytest.mark.parametrize(("name", "stages"), [("plain", (1, 3)), ("gpt2", (0, 1, 2, 3))])
def test_on_two_ranks_all_stages_have_the_same_bits(ranks, name, stages):
    ranks(2, on_ranks, name, stages)


def peak(step, state, batch):
    """The most bytes that a step has beside what was there before, those of its operations while they run included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        kept = step(state, batch)
    events = sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    del kept
    return max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))


def test_what_is_measured_is_what_was_planned():
    low, model = least("llama"), build("llama")
    state, step = state_of(model, 3), zerofn.compile(step_of(model), memory=low)
    for _ in range(2):
        state, _ = step(state, batch_of())
    plan = step.lower(state, batch_of())
    planned = plan.memory().total - sum(resident(plan.program).device.values())
    assert planned * 0.98 <= peak(step, state, batch_of()) <= planned * 1.005


@pytest.mark.whole
def test_a_plan_for_a_device_takes_tiles_and_counts_their_products():
    def row(memory):
        model, options = build("llama"), {"stage": 3, "precision": "bf16", "remat": "budget", "memory": memory}
        make = lambda: zerofn.TrainState.create(params=dict(model.named_parameters()), tx=optim.adamw(1e-2))  # noqa: E731
        return zerofn.plan(step_of(model), make, batch_of(), machine="A100-8", world=2, offload=None, **options)[0]

    whole = row(1 << 40).plan
    tiles = row(int(0.8 * whole.memory().total)).plan
    assert in_tiles(whole.program.gm) == [] != in_tiles(tiles.program.gm)
    assert "logits in tiles: 256 tokens" in tiles.text() and "logits in tiles" not in whole.text()
    assert tiles.flops.model == whole.flops.model
    assert tiles.flops.again - whole.flops.again >= 2 * 2 * ROWS * LENGTH * VOCABULARY * WIDTH


def prepared(train_step, state, batch):
    program = capture(train_step, state, batch)
    passes.pipeline(True).prepare(program)
    return program


def heads(model, read=lambda out: out.loss, has_aux=False):
    state, batch = state_of(model, 3), batch_of()

    def train_step(state, batch):
        vg = state.value_and_grad(lambda params, batch: read(functional_call(model, params, (), batch)), has_aux)
        loss, grads = vg(batch)
        return state.apply_gradients(grads), loss

    return heads_of(prepared(train_step, state, batch).gm.graph)


def test_heads_are_found_whatever_the_loss_is_multiplied_by():
    (head,) = heads(build("llama"), lambda out: 3 * out.loss + out.loss**2).values()
    assert tensor_of(head.x).shape == (ROWS * LENGTH, WIDTH) and head.bias is None and head.of_bias is None
    (head,) = heads(Plain(reduction="sum", ignore_index=3)).values()
    assert head.bias is not None and head.of_bias is not None


@pytest.mark.parametrize(
    ("model", "read", "has_aux"),
    [
        (Plain(label_smoothing=0.1), lambda out: out.loss, False),
        (Plain(weight=torch.ones(VOCABULARY)), lambda out: out.loss, False),
        (Rounded(), lambda out: out.loss, False),
        (Plain(cast=torch.bfloat16), lambda out: out.loss, False),
        (Plain(), lambda out: out.loss + out.logits.square().mean(), False),
        (Plain(), lambda out: (out.loss, out.logits), True),
        (Plain(), lambda out: (out.loss, out.logits.argmax(-1)), True),
    ],
    ids=[
        "smooth labels",
        "weights of classes",
        "logits cast twice",
        "logits cast down",
        "another loss",
        "logits",
        "predictions",
    ],
)
def test_logits_that_something_else_reads_stay_whole(model, read, has_aux):
    assert heads(model, read, has_aux) == {}


@pytest.mark.whole
def test_without_the_pass_logits_stay_whole():
    options = {"passes": lambda ours: [x for x in ours if x.name != "tile_logits"]}
    low = least("llama", **options)
    assert low > least("llama")
    assert trained("llama", low, **options)[1] == []


def test_a_backend_that_compiles_losses_has_no_tiles():
    """Compiled, a loss has other bits than in tiles, and bits may not depend on the budget."""
    assert tile_logits in [each.fn for each in passes.standard()]
    assert tile_logits not in [each.fn for each in Inductor().passes(passes.standard())]


def test_ranks_exchange_decisions_as_text():
    choices = [Choice(tiled=frozenset({"b", "a"})), Choice()]
    assert from_text(as_text(choices)) == choices
