"""Activations that are computed again: the same bits, dropout's masks included, in less memory."""

import pytest
import torch
import transformers as hf
from torch.func import functional_call

import zerofn
from tests.support import tiny_models
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, loss_of, state_of, step_with, trained
from zerofn import optim, tree
from zerofn.graph.liveness import AGAIN
from zerofn.graph.nested import graphs_of

LAYERS, ROWS = 10, 64


def kept(plan):
    """The most bytes of activations at a time."""
    return max(x.live["activations"] for x in plan.memory().over_time)


def with_remat(remat, stage=3, num_microbatches=1, precision=None):
    """(plan, losses and parameters) after two steps."""
    return trained(
        LAYERS,
        ROWS,
        optim.adamw(1e-2),
        2,
        stage=stage,
        num_microbatches=num_microbatches,
        precision=precision,
        remat=remat,
    )


def compared(stage, num_microbatches, precision):
    plain, expected = with_remat(None, stage, num_microbatches, precision)
    full, found = with_remat("full", stage, num_microbatches, precision)
    assert_same_trees(found, expected)
    half, found = with_remat("auto", stage, num_microbatches, precision)
    assert_same_trees(found, expected)
    assert kept(half) <= kept(plain) / 2
    return kept(plain) / kept(full)


@pytest.mark.part(num_microbatches=[2])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_one_rank(num_microbatches):
    assert compared(3, num_microbatches, None) > 2  # of a linear layer, tanh and dropout not much is left out


@pytest.mark.whole  # test_on_two_ranks_all_stages_have_the_same_bits of tiles recomputes, too
@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks(ranks, stage):
    assert min(ranks(2, compared, stage, 1, "bf16")) > 2


def one_step(name, remat):
    torch.manual_seed(0)
    model, inputs = tiny_models.BUILDERS[name]().train(), tiny_models.batch(name)

    def loss_fn(params, batch):
        return functional_call(model, params, (), batch).logits.float().square().mean()

    train_step = step_with(loss_fn)

    params = dict(model.named_parameters())
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.adamw(1e-2)), unit=layer_of)
    state, loss = zerofn.compile(train_step, remat=remat)(state, inputs)
    return [loss, *tree.leaves(zerofn.unshard(state.params))]


@pytest.mark.part(name=["gpt2"])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_models(name):
    """With dropout where the model has it."""
    expected = one_step(name, None)
    for remat in ("full", "auto"):
        assert_same_trees(one_step(name, remat), expected, str(remat))


def layer_of(name):
    """A unit for each layer, however small."""
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: at + 1])


def gpt2():
    config = hf.GPT2Config(
        n_layer=12, vocab_size=64, n_positions=32, n_embd=32, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 64, (2, 32))}


def t5():
    """What relative positions add is used by all layers."""
    config = hf.T5Config(
        num_layers=6, vocab_size=64, d_model=32, d_kv=8, d_ff=96, num_heads=4, use_cache=False, decoder_start_token_id=0
    )
    ids = torch.randint(0, 64, (2, 32))
    return hf.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize(("model", "times"), [(gpt2, 5), (t5, 4)])
def test_a_deep_model_keeps_little(model, times):
    """Of transformers with dropout, beside the loss: what crosses layers, and one layer's."""
    torch.manual_seed(0)
    model, batch = model()

    def train_step(state, batch):
        def loss_fn(params, batch):
            return functional_call(model, params, (), batch).logits.square().mean()

        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    def run(remat):
        params = dict(model.named_parameters())
        state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3)), unit=layer_of)
        step = zerofn.compile(train_step, remat=remat)
        plan = step.lower(state, batch)
        state, loss = step(state, batch)
        return kept(plan), [loss, *tree.leaves(zerofn.unshard(state.params))]

    (most, expected), (least, found) = run(None), run("full")
    assert least <= most / times
    assert_same_trees(found, expected)


def test_what_is_computed_again_is_marked_and_nothing_else_is_added():
    plan, _ = with_remat("full", num_microbatches=2)
    _, body = graphs_of(plan.graph)
    again = [n for n in body.graph.nodes if n.meta.get(AGAIN)]
    assert again and all(n.meta["phase"] == "backward" for n in again)
    assert not any(n.meta.get(AGAIN) for n in plan.graph.graph.nodes)


def test_a_model_that_asks_for_it_itself():
    """What `zerofn.remat` computes again is not computed a third time."""
    module = build(6, dropout=0.2)
    inner = loss_of(module)
    step = step_with(zerofn.remat(inner))

    def run(**options):
        state, loss = zerofn.compile(step, **options)(state_of(module, 3), batch_of(rows=ROWS))
        return [loss, *tree.leaves(zerofn.unshard(state.params))]

    assert_same_trees(run(), run(memory="1TB"))


class Still(torch.nn.Module):
    """What saves tensors without elements for its backward pass: batch norm that is not trained."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh()) for _ in range(6))
        ).eval()

    def forward(self, x):
        return self.net(x)


def test_what_has_no_elements_is_not_dropped():
    module = Still()
    held = dict(module.named_buffers())

    def step(state, batch):
        def loss_fn(params, x):
            return functional_call(module, {**params, **held}, (x,)).square().mean()

        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    def run(**options):
        params = {name: x.clone() for name, x in module.named_parameters()}
        state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.adamw(1e-2)), unit=layer_of)
        compiled = zerofn.compile(step, **options)
        most = compiled.lower(state, torch.ones(512, 16)).memory().total
        state, loss = compiled(state, torch.ones(512, 16))
        return most, [loss, *tree.leaves(zerofn.unshard(state.params))]

    most, expected = run()
    for options in ({"remat": "auto"}, {"memory": most * 9 // 10}):
        less, found = run(**options)
        assert less < most
        assert_same_trees(found, expected)


MODULE = build(2)


def no_backward(state, batch):
    return loss_of(MODULE)(zerofn.gather(state.params), batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remat": "some"}, "remat='some' is not known; expected 'full', 'auto' or None"),
        ({"remat": "auto", "memory": "1GB"}, "chooses which activations are recomputed. Leave remat='auto' out"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        zerofn.compile(no_backward, **options)


@pytest.mark.parametrize("how", ["full", "auto"])
def test_a_step_that_keeps_nothing_runs_and_the_log_says_so(how, caplog):
    state, batch = state_of(MODULE, 3), batch_of()
    with caplog.at_level("INFO", "zerofn"):
        assert torch.equal(zerofn.compile(no_backward, remat=how)(state, batch), no_backward(state, batch))
    assert f"no_backward: remat={how!r} changes nothing: no activation is kept" in caplog.text
