"""Sizes that depend on data: the bits of the eager step, at every stage and under budgets; else a sentence."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from zerofn import optim
from zerofn.capture.capture import CaptureError
from zerofn.capture.checked_capture import captured

WIDTH, NUM = 8, 12


def params():
    draw = torch.Generator().manual_seed(0)
    return {f"{k}.w": torch.randn(WIDTH, WIDTH, generator=draw) for k in range(3)}


def batch_of(rank=0, seed=0):
    draw = torch.Generator().manual_seed(100 * seed + rank)
    return {
        "x": torch.randn(NUM, WIDTH, generator=draw),
        "mask": torch.rand(NUM, generator=draw) > 0.4,
        "token": torch.randint(0, 20, (NUM,), generator=draw),
    }


def masked(params, batch):
    h = torch.tanh(batch["x"] @ params["0.w"])[batch["mask"]]
    return torch.tanh(torch.tanh(h @ params["1.w"]) @ params["2.w"]).square().mean()


def of_nonzero(params, batch):
    h = torch.tanh(batch["x"] @ params["0.w"])
    rows = batch["mask"].nonzero()[:, 0]
    return torch.tanh(torch.relu(h[rows] @ params["1.w"]) @ params["2.w"]).square().mean()


def of_unique(params, batch):
    tokens, places = torch.unique(batch["token"], return_inverse=True)
    table = torch.tanh(params["0.w"][tokens % WIDTH] @ params["1.w"])
    return torch.tanh(table[places] @ params["2.w"]).square().mean()


LOSSES = [masked, of_nonzero, of_unique]


def state_of(stage):
    plain = zerofn.TrainState.create(params=params(), tx=optim.adamw(1e-2))
    return zerofn.shard(plain, stage=stage, unit=lambda name: name.partition(".")[0])


def trained(loss_fn, compiled, stage=3, num_microbatches=1, **options):
    rank = dist.get_rank() if dist.is_initialized() else 0
    state, step = state_of(stage), step_with(loss_fn, num_microbatches)
    step, losses = zerofn.compile(step, **options) if compiled else step, []
    for k in range(3):
        state, loss = step(state, batch_of(rank, k))
        losses.append(loss)
    return zerofn.unshard(state.params), losses


@pytest.mark.part(options=[{}])
@pytest.mark.part(loss_fn=[of_nonzero], options=[{"remat": "full"}, {"memory": 1 << 17}])
@pytest.mark.parametrize("options", [{}, {"remat": "full"}, {"remat": "auto"}, {"memory": 1 << 17}], ids=str)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_captured_is_eager(loss_fn, options):
    assert_same_trees(trained(loss_fn, True, **options), trained(loss_fn, False))


def on_ranks(loss_fn, stage, options):
    return trained(loss_fn, True, stage, **options), trained(loss_fn, False, stage)


@pytest.mark.part(loss_fn=[masked], stage=[3])
@pytest.mark.part(stage=[0], loss_fn=[of_unique])
@pytest.mark.parametrize(
    ("loss_fn", "stage"), [(masked, 0), (masked, 3), (of_nonzero, 1), (of_nonzero, 2), (of_unique, 0), (of_unique, 3)]
)
def test_on_ranks_with_other_sizes(ranks, loss_fn, stage):
    options = {"remat": "full"} if stage == 3 else {}
    for found, expected in ranks(2 + stage % 2, on_ranks, loss_fn, stage, options):
        assert_same_trees(found, expected)


def test_a_plan_takes_upper_bounds():
    program, _ = captured(step_with(masked), state_of(3), batch_of())
    shapes = [x.meta["val"].shape for x in program.gm.graph.nodes if isinstance(x.meta.get("val"), torch.Tensor)]
    assert all(type(n) is int for shape in shapes for n in shape)
    assert (NUM, WIDTH) in [tuple(x) for x in shapes]


def of_masked_select(params, batch):
    return torch.masked_select(torch.tanh(batch["x"] @ params["0.w"]), batch["mask"][:, None]).square().mean()


def of_checked(params, batch):
    """Traced twice, as a library's check of data is left out in the second trace only."""
    loss = of_nonzero(params, batch)
    if not torch.compiler.is_compiling() and not batch["mask"].any():
        raise ValueError("the mask is empty")
    return loss


ALL = {"x": torch.arange(1.0, 1 + NUM * WIDTH).reshape(NUM, WIDTH), "mask": torch.ones(NUM).bool()}


# Each takes the most that it may of `ALL`: the size that plain torch finds is the bound.
@pytest.mark.parametrize(
    "choose",
    [
        lambda x, mask: x[mask],
        lambda x, mask: x.reshape(2, -1, WIDTH)[mask[:2]],
        lambda x, mask: x.reshape(-1, 2, WIDTH)[:, mask[:2]],
        lambda x, mask: x[x > 0],
        lambda x, mask: x[mask][mask[x[mask][:, 0].long() % NUM]],
        lambda x, mask: x.nonzero(),
        lambda x, mask: torch.where(x > 0)[1],
        lambda x, mask: torch.masked_select(x, mask[:, None]),
        lambda x, mask: torch.masked_select(x[:, :1], mask),
        lambda x, mask: torch.unique(x),
        lambda x, mask: torch.unique(x, dim=0),
        lambda x, mask: torch.unique_consecutive(x[:, 0]),
    ],
)
def test_the_bound_is_the_largest_size_that_may_be(choose):
    program, _ = captured(lambda state, batch: choose(**batch).sum(), state_of(0), ALL)
    (summed,) = (n for n in program.gm.graph.nodes if n.target is torch.ops.aten.sum.default)
    assert summed.args[0].meta["val"].shape == choose(**ALL).shape


def test_the_step_may_say_the_bound():
    def step(state, batch):
        rows = batch["x"].repeat_interleave(batch["mask"].long() * 5, 0)
        torch._check(rows.shape[0] <= 5 * NUM)
        return (rows @ batch["x"].T).sum()

    assert zerofn.compile(step).lower(state_of(0), ALL).flops.model == 2 * (5 * NUM) * WIDTH * NUM


@pytest.mark.whole
@pytest.mark.parametrize("loss_fn", [*LOSSES, of_masked_select, of_checked])
def test_zerofn_plan_takes_the_bounds_of_the_captured_step(loss_fn):
    init, step = lambda: zerofn.TrainState.create(params=params(), tx=optim.adamw(1e-2)), step_with(loss_fn)
    row = zerofn.plan(step, init, batch_of(), world=1, stage=3, machine="A100", precision=None).plan
    here = zerofn.compile(step, machine="A100").lower(state_of(3), batch_of())
    assert row.flops == here.flops
    with FlopCounterMode(display=False) as counter:  # of all rows
        leaves = {k: x.requires_grad_() for k, x in params().items()}
        loss_fn(leaves, batch_of() | {"mask": ALL["mask"], "token": torch.arange(NUM)}).backward()
    assert row.flops.model == counter.get_total_flops()


def of_rounds(params, batch):
    with torch.no_grad():
        rounds = torch.zeros((), dtype=torch.int64)
        x = torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (rounds, batch["x"]))[1]
    return (x @ params["0.w"]).square().mean()


def test_a_loop_whose_rounds_depend_on_data_is_planned():
    init, step = lambda: zerofn.TrainState.create(params=params(), tx=optim.adamw(1e-2)), step_with(of_rounds)
    row = zerofn.plan(step, init, batch_of(), world=1, stage=3, machine="A100", precision=None).plan
    here = zerofn.compile(step, machine="A100").lower(state_of(3), batch_of())
    assert row.flops == here.flops and row.flops.model > 0 and row.memory().total > 0


@pytest.mark.whole
def test_a_result_of_such_a_size_is_refused():
    def step(state, batch):
        return {"rows": batch["x"][batch["mask"]]}

    with pytest.raises(
        CaptureError, match=r"a result of the step has a size that depends on data at .*test_data_sizes.py.*Pad it"
    ):
        zerofn.compile(step)(state_of(3), batch_of())


def of_dropout(params, batch):
    return F.dropout(batch["x"][batch["mask"]] @ params["0.w"], 0.2).square().mean()


def of_sparse(params, batch):
    return F.embedding(batch["token"] % WIDTH, params["0.w"], sparse=True).square().mean()


def of_jagged(params, batch):
    rows = torch.nested.nested_tensor_from_jagged(batch["x"] @ params["0.w"], torch.tensor([0, 4, NUM]))
    return rows.values().square().mean()


TRANSFORMER = torch.nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True).requires_grad_(False)


def of_transformer(params, batch, causal=None, shut=0):
    x = (batch["x"] @ params["0.w"])[None]
    mask = TRANSFORMER.generate_square_subsequent_mask(NUM) + shut
    return functional_call(TRANSFORMER, {}, (x, x), {"tgt_mask": mask, "tgt_is_causal": causal}).square().mean()


@pytest.mark.filterwarnings("ignore")  # torch's own, of tracing
@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (of_dropout, "put the part that reads it inside zerofn.eager_region"),
        (of_sparse, r"write nn.Embedding\(..., sparse=False\)"),
        (of_jagged, "pad and mask, or put the part that uses them inside zerofn.eager_region"),
        (
            lambda p, b: of_transformer(p, b, shut=0 * b["token"][0]),
            r"Pass is_causal=True or False \(tgt_is_causal= of nn.Transformer\)",
        ),
    ],
)
def test_what_cannot_be_is_a_sentence(loss_fn, said):
    with pytest.raises((RuntimeError, ValueError), match=said):
        zerofn.compile(step_with(loss_fn))(state_of(3), batch_of())


def test_microbatches_have_such_sizes_of_their_own():
    found, expected = (trained(masked, compiled, num_microbatches=2) for compiled in (True, False))
    assert_same_trees(found, expected)


def of_normal(params, batch):
    scale = torch.exp(0.1 * params["1.w"][:1])
    return -torch.distributions.Normal(torch.tanh(batch["x"] @ params["0.w"]), scale).log_prob(batch["x"]).mean()


def of_categorical(params, batch):
    return -torch.distributions.Categorical(logits=batch["x"] @ params["0.w"]).log_prob(batch["token"] % WIDTH).mean()


@pytest.mark.part(loss_fn=[of_categorical, of_transformer])
@pytest.mark.parametrize(
    "loss_fn", [of_normal, of_categorical, of_transformer, lambda p, b: of_transformer(p, b, True)]
)
def test_distributions_and_masks_are_captured(loss_fn, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile turns it off for good
    found, expected = (trained(loss_fn, compiled) for compiled in (True, False))
    assert_same_trees(found, expected)
    assert torch.distributions.Distribution._validate_args
