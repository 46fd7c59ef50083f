import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.small_steps import WIDTH, batch_of, build, captured, fake_ranks, loss_of, state_of
from zerofn.capture.capture import CaptureError
from zerofn.passes.sync_replicated_state import sync_replicated_state

ops = torch.ops.zerofn


def step_with(extra_of):
    """A training step whose `extra` becomes `extra_of(state, batch, loss)`."""
    module = build()
    loss_fn = loss_of(module)

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads, extra=extra_of(state, batch, loss)), loss

    return module, step


def num_transfers(program):
    return sum(n.target is ops.all_gather.default for n in program.gm.graph.nodes)


def num_added(extra, extra_of):
    module, step = step_with(extra_of)
    with fake_ranks(2):
        program = captured(step, state_of(module, 3, extra=extra), batch_of())
        before = num_transfers(program)
        sync_replicated_state(program)
    return num_transfers(program) - before


def test_what_does_not_depend_on_the_batch_is_left_alone():
    extra = {"mean": torch.zeros(WIDTH), "calls": torch.tensor(0), "loss": torch.zeros(())}
    # The loss is the global one: its average over steps is the same on every rank as it is.
    assert (
        num_added(
            extra,
            lambda s, b, loss: {
                "mean": s.extra["mean"] * 0.9,
                "calls": s.extra["calls"] + 1,
                "loss": s.extra["loss"] * 0.9 + loss,
            },
        )
        == 0
    )


def test_one_transfer_serves_all_entries_of_a_dtype():
    extra = {"mean": torch.zeros(WIDTH), "var": torch.zeros(WIDTH), "wide": torch.zeros((), dtype=torch.float64)}
    assert (
        num_added(
            extra, lambda s, b, loss: {"mean": b["x"].mean(0), "var": b["x"].var(0), "wide": b["y"].double().sum()}
        )
        == 2
    )


def test_a_whole_number_has_no_mean():
    with pytest.raises(CaptureError, match=r"'extra\.seen' \(torch.int64\) is replicated.*all_reduce"):
        num_added({"seen": torch.tensor(0)}, lambda s, b, loss: {"seen": (b["x"] > 0).sum()})


@pytest.mark.parametrize("name", ["a", "z"])  # before and after the rest
def test_a_number_in_the_state_shifts_nothing(name):
    def step(state, batch):
        return {**state, name: 5, "seen": batch["x"].mean(0)}, batch["x"].sum()

    state = {"params": {"w": torch.ones(WIDTH)}, "seen": torch.zeros(WIDTH), name: 0}
    with fake_ranks(2):
        program = captured(step, zerofn.shard(state), batch_of())
        sync_replicated_state(program)
    outputs = zip([*program.new_state.names, "aux"], program.output.args[0], strict=True)
    assert [name for name, x in outputs if x.target is ops.part.default] == ["seen"]


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))

    def forward(self, x):
        return self.body(x)


def buffers_after_three_steps(stage, num_microbatches=1, **options):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    module = Normed()
    buffers = {k: v.clone() for k, v in module.named_buffers()}

    def step(state, batch):
        inside = {k: v.clone() for k, v in state.extra.items()}

        def loss_fn(params, batch):
            return functional_call(module, (params, inside), (batch["x"],)).square().mean()

        vg = state.value_and_grad(loss_fn)
        loss, grads = (zerofn.accumulate(vg, num_microbatches) if num_microbatches > 1 else vg)(batch)
        return state.apply_gradients(grads, extra=inside), loss

    tx = zerofn.optim.sgd(0.0)  # the parameters stay, so that running values have a closed form
    state = state_of(module, stage, tx, extra=buffers)
    run = zerofn.compile(step, **options)
    for k in range(3):
        state, _ = run(state, batch_of(rank, seed=k))
    expected = []
    for r in range(size):
        own = Normed()
        for k in range(3):
            for part in batch_of(r, seed=k)["x"].chunk(num_microbatches):
                own(part)
        expected.append(dict(own.named_buffers()))
    return state.extra, expected


def means(stage, num_microbatches):
    ours, per_rank = buffers_after_three_steps(stage, num_microbatches)
    for name, value in ours.items():
        mean = torch.stack([x[name].double() for x in per_rank]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-6)
    assert ours["body.1.num_batches_tracked"].dtype == torch.int64
    return ours


@pytest.mark.parametrize(("stage", "num_microbatches"), [(0, 1), (3, 1), (1, 2), (3, 2)])
def test_batch_norms_running_values_are_means_over_ranks(ranks, stage, num_microbatches):
    first, second = ranks(2, means, stage, num_microbatches)
    assert all(torch.equal(first[k], second[k]) for k in first)


def of_the_first(stage, num_microbatches):
    ours, per_rank = buffers_after_three_steps(stage, num_microbatches, broadcast_buffers=True)
    torch.testing.assert_close(ours, per_rank[0], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(per_rank[0]["body.1.running_mean"], per_rank[1]["body.1.running_mean"])
    return ours


@pytest.mark.parametrize(("size", "stage", "num_microbatches"), [(2, 0, 1), (3, 3, 2)])
def test_with_broadcast_buffers_they_are_the_first_ranks(ranks, size, stage, num_microbatches):
    first, *others = ranks(size, of_the_first, stage, num_microbatches)
    assert all(torch.equal(first[k], other[k]) for k in first for other in others)


def kinds_of_the_first():
    def step(state, batch):
        seen = {"rows": batch["x"][:3, 0] > 0, "place": state["seen"]["place"] + batch["x"].gt(0).sum(), "calls": 1}
        return {**state, "seen": {**seen, "half": batch["x"].bfloat16().sum(0)}}, None

    seen = {"rows": torch.zeros(3, dtype=torch.bool), "place": torch.tensor(0), "half": torch.zeros(WIDTH).bfloat16()}
    state = zerofn.shard({"params": {"w": torch.ones(3)}, "seen": {**seen, "calls": 0}})
    state, _ = zerofn.compile(step, broadcast_buffers=True)(state, batch_of(torch.distributed.get_rank()))
    return state["seen"]


def test_every_dtype_may_be_the_first_ranks(ranks):
    x = batch_of(0)["x"]
    for found in ranks(3, kinds_of_the_first):
        assert torch.equal(found["rows"], x[:3, 0] > 0) and found["place"] == (x > 0).sum() and found["calls"] == 1
        assert torch.equal(found["half"], x.bfloat16().sum(0))


def differing():
    rank = torch.distributed.get_rank()
    step = zerofn.compile(lambda state, x: ({**state, "mean": x.mean()}, None), broadcast_buffers=rank == 0)
    with pytest.raises(RuntimeError, match="broadcast_buffers"):
        step(zerofn.shard({"params": {"w": torch.ones(2)}, "mean": torch.zeros(())}), torch.ones(2))


def test_ranks_must_agree_on_it(ranks):
    ranks(2, differing)


def test_a_count_over_microbatches_of_what_a_batch_holds_has_no_mean():
    def step(state, batch):
        seen = state["seen"].clone()

        def loss_fn(params, batch):
            seen.add_((batch["x"] > 0).sum())
            return (params["w"] * batch["x"]).square().mean()

        loss, grads = zerofn.accumulate(zerofn.value_and_grad(loss_fn), 2)(state["params"], batch)
        params = zerofn.tree.tree_map(lambda p, g: p - g, state["params"], grads)
        return {"params": params, "seen": seen}, loss

    state = {"params": {"w": torch.ones(WIDTH)}, "seen": torch.tensor(0)}
    with fake_ranks(2):
        program = captured(step, zerofn.shard(state), batch_of())
        with pytest.raises(CaptureError, match="'seen'.*depends on this rank's batch"):
            sync_replicated_state(program)
