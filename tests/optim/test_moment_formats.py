"""Moments in bfloat16, 8-bit and float8 blocks: at every stage and number of ranks the same, small, near float32's."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, fake_ranks, scheduled, state_of, train_step_of
from tests.support.some import some_of
from zerofn import optim, tree
from zerofn.graph.node_kinds import codec_operations

ops = torch.ops.zerofn
RULES = {
    "adamw": lambda moments: optim.adamw(1e-2, weight_decay=0.1, moments=moments),
    "adam": lambda moments: optim.adam(1e-2, moments=moments),
    "lion": lambda moments: optim.lion(1e-3, moments=moments),
    "sgd": lambda moments: optim.sgd(0.1, 0.9, moments=moments),
}
each_rule = pytest.mark.parametrize("name", RULES)
each_format = pytest.mark.parametrize("moments", ["bf16", "8bit", "fp8"])


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def trained(name, moments, stage, num_steps=6, compiled=True, rows=12):
    """Parameters and moments after some steps on a batch that all ranks share, as full tensors."""
    module = build(3)
    state = state_of(module, stage, RULES[name](moments))
    step = zerofn.compile(train_step_of(module)) if compiled else train_step_of(module)
    size = dist.get_world_size() if dist.is_initialized() else 1
    for k in range(num_steps):
        whole = batch_of(0, rows=rows, seed=k)
        mine = tree.tree_map(lambda x: x.chunk(size)[rank()].clone(), whole)
        state, _ = step(state, mine)
    return zerofn.unshard((state.params, state.opt_state))


@pytest.mark.part(moments=["8bit"], name=["adamw", "lion"])
@pytest.mark.part(name=["adamw"], moments=["fp8"])
@each_format
@each_rule
def test_captured_is_eager(name, moments):
    ours, theirs = (trained(name, moments, 3, compiled=c) for c in (True, False))
    assert_same_trees(ours, theirs)


def at_all_stages(name, moments):
    first = trained(name, moments, 0)
    for stage in some_of(range(1, 4), 1, 3):
        other = trained(name, moments, stage)
        assert_same_trees(other, first, f"{name}, moments in {moments}, stage {stage} beside stage 0")


@pytest.mark.part(moments=["8bit"], num_ranks=[2], name=["adamw"])
@each_format
@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_stage_has_the_same_bits(ranks, num_ranks, name, moments):
    ranks(num_ranks, at_all_stages, name, moments)


@pytest.mark.parametrize(
    ("moments", "nbytes"), [(None, 8.0), ("bf16", 4.0), ("8bit", 2 * (1 + 4 / 256)), ("fp8", 2 * (1 + 4 / 256))]
)
def test_bytes_an_element(moments, nbytes):
    state = state_of(build(3), 3, RULES["adamw"](moments)).opt_state
    held = sum(x.nbytes for m in (state.mu, state.nu) for x in m.stored)
    assert held == nbytes * sum(u.size for u in state.mu.layout.units)


@each_format
def test_they_are_updated_where_they_lie(moments):
    module = build(3)
    with fake_ranks(2):
        state = state_of(module, 3, RULES["adamw"](moments), precision="bf16")
        batch = tree.tree_map(torch.Tensor.bfloat16, batch_of())
        gm = scheduled(train_step_of(module), state, batch, donating=True).gm
    targets = [n.target for n in gm.graph.nodes]
    assert targets.count(ops.adamw_.default) == 3
    assert not {*codec_operations(), torch.ops.aten.copy_.default} & set(targets)


@pytest.mark.part(moments=["8bit"])
@each_format
def test_training_goes_on_as_with_float32(moments):
    """The first 200 steps of a small regression: where float32's loss goes, theirs goes."""
    ends = []
    for how in (None, moments):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
        target = torch.nn.Linear(16, 16)
        tx = optim.adamw(1e-2, weight_decay=0.0, moments=how)
        params = {n: p.detach().clone() for n, p in module.named_parameters()}
        state = zerofn.shard(zerofn.TrainState.create(params=params, tx=tx))

        def loss_fn(params, batch, module=module):
            return (torch.func.functional_call(module, params, (batch["x"],)) - batch["y"]).square().mean()

        def step(state, batch, loss_fn=loss_fn):
            loss, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads), loss

        run, losses = zerofn.compile(step), []
        for _ in range(200):
            x = torch.randn(64, 16)
            state, loss = run(state, {"x": x, "y": target(x).detach()})
            losses.append(float(loss))
        ends.append(sum(losses[-20:]) / 20)
        assert ends[-1] < losses[0] / 10
    assert abs(math.log(ends[1] / ends[0])) < math.log(1.5)


def test_a_second_moment_falls_when_gradients_do():
    """Rounded to nearest it would stay: a thousandth a step is less than half of what lies between two numbers."""
    for moments in ("bf16", "8bit", "fp8"):
        tx = optim.adamw(0.0, b2=0.999, weight_decay=0.0, moments=moments)
        params = zerofn.shard({"params": {"w": torch.zeros(4096)}})["params"]
        state, finite = tx.init(params), None
        big, small = (tree.tree_map(lambda p, v=v: torch.full_like(p, v), params) for v in (1.0, 1e-3))
        for grads in [big] * 20 + [small] * 300:
            _, state = tx.fused.apply(grads, state, params, None, finite)
        expected = (1 - 0.999**20) * 0.999**300
        assert zerofn.gather(state.nu)["w"].float().mean().item() == pytest.approx(expected, rel=0.03)


def checkpointed(path, first, second):
    module = build(2)
    step = zerofn.compile(train_step_of(module))
    state, _ = step(state_of(module, 3, RULES["adamw"](first)), batch_of(rank()))
    zerofn.save(path / f"{first}-{second}", state)
    mine = zerofn.unshard(state.opt_state.nu)
    like = state_of(module, 3, RULES["adamw"](second))
    loaded = zerofn.unshard(zerofn.load(path / f"{first}-{second}", like=like).opt_state.nu)
    return max(
        float(((a.float() - b.float()).abs() / (a.float().abs() + 1e-30)).max())
        for a, b in zip(tree.leaves(mine), tree.leaves(loaded), strict=True)
    )


@pytest.mark.part(second=["8bit"])
@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        ("8bit", "8bit", 0.0),
        ("bf16", "bf16", 0.0),
        ("8bit", None, 0.0),
        (None, "8bit", 1 / 16),
        (None, "bf16", 1 / 256),
        ("fp8", "fp8", 0.0),
        ("fp8", None, 0.0),
        (None, "fp8", 1 / 8),
    ],
)
def test_checkpoints_between_formats(ranks, tmp_path, first, second, error):
    for num_ranks in (1, 2):
        assert max(ranks(num_ranks, checkpointed, tmp_path, first, second)) <= error * 1.0001


def saved_at(path, moments):
    """The second moment of a state that was saved, and the bits of its codes at rank 0."""
    module = build(2)
    state, _ = zerofn.compile(train_step_of(module))(state_of(module, 3, RULES["adamw"](moments)), batch_of(rank()))
    zerofn.save(path, state)
    return zerofn.unshard(state.opt_state)


def loaded_at(path, moments, stage):
    module = build(2)
    state = zerofn.load(path, like=state_of(module, stage, RULES["adamw"](moments)))
    assert all(x.storage.codec.note for x in state.opt_state.nu.stored)
    return zerofn.unshard(state.opt_state)


@pytest.mark.part(moments=["8bit"])
@pytest.mark.parametrize("moments", ["8bit", "fp8"])
def test_blocks_do_not_move_with_the_number_of_ranks(ranks, tmp_path, moments):
    saved = ranks(2, saved_at, tmp_path / "x", moments)[0]
    for num_ranks, stage in ((1, 3), (3, 3), (3, 1)):
        for loaded in ranks(num_ranks, loaded_at, tmp_path / "x", moments, stage):
            assert all(map(torch.equal, tree.leaves(loaded), tree.leaves(saved)))


@each_format
def test_a_skipped_step_changes_no_bit_of_what_is_stored(moments):
    module = build(2)
    state, step = state_of(module, 3, RULES["adamw"](moments)), zerofn.compile(train_step_of(module))
    state, _ = step(state, batch_of())
    before = [part.clone() for x in (state.params, state.opt_state.mu, state.opt_state.nu) for part in x.parts]
    state, _ = step(state, tree.tree_map(lambda x: x * torch.inf, batch_of()))
    after = [part for x in (state.params, state.opt_state.mu, state.opt_state.nu) for part in x.parts]
    assert int(state.skipped) == 1 and all(map(torch.equal, before, after))


@each_format
def test_a_state_in_a_format_is_copied_and_pickled(moments):
    state = RULES["adamw"](moments).init({"w": torch.ones(3)})
    for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), tree.tree_map(lambda x: x, state)):
        assert (
            type(again) is type(state)
            and isinstance(again, optim.AdamState)
            and torch.equal(again.nu["w"], state.nu["w"])
        )


def test_what_cannot_be_is_a_sentence():
    with pytest.raises(ValueError, match="adamw: moments='4bit' is not known"):
        optim.adamw(1e-3, moments="4bit")
    with pytest.raises(ValueError, match="no effect without momentum"):
        optim.sgd(1e-3, moments="8bit")
    module = build(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="8-bit blocks: such moments hold float32, but the parameters are float64"):
        state_of(module, 3, RULES["adamw"]("8bit"))
    with pytest.raises(ValueError, match="float8 blocks: such moments hold float32, but the parameters are float64"):
        state_of(module, 3, RULES["adamw"]("fp8"))
    params = {"w": torch.ones(3, dtype=torch.float64)}
    tx = RULES["lion"]("fp8")
    with pytest.raises(TypeError, match="float8 blocks need a float32 master; here the master is float64, on cpu"):
        tx.fused.apply(params, tx.init(params), params, None, None)
    state = state_of(module, 3, RULES["adamw"]("bf16"))
    with pytest.raises(TypeError, match="need a float32 master"):
        zerofn.compile(train_step_of(module))(state, batch_of(dtype=torch.float64))


@pytest.mark.part(moments=["8bit"])
@each_format
def test_a_second_moment_falls_in_a_chain_as_it_does_alone(moments):
    def fallen(tx, num_steps=100):
        state = zerofn.shard(zerofn.TrainState.create(params={"w": torch.zeros(4096)}, tx=tx), stage=3)

        def train_step(state, x):
            _, grads = state.value_and_grad(lambda p, x: (p["w"] * x).sum())(x)
            return state.apply_gradients(grads), None

        def mean():
            return zerofn.unshard(state.opt_state[-1].nu)["w"].double().mean().item()

        step = zerofn.compile(train_step)
        state, _ = step(state, torch.ones(4096))
        first = mean()
        for _ in range(num_steps):
            state, _ = step(state, torch.zeros(4096))
        return mean() / first

    adamw = optim.adamw(1e-3, moments=moments)
    assert fallen(optim.chain(optim.clip(1e9), adamw)) == pytest.approx(0.999**100, rel=2e-3)
    assert fallen(optim.chain(adamw)) == pytest.approx(0.999**100, rel=2e-3)


@each_format
def test_moments_in_a_format_come_last_in_a_chain(moments):
    for tx in (optim.adamw(1e-3, moments=moments), optim.chain(optim.lion(1e-3, moments=moments))):
        with pytest.raises(ValueError, match="must come last, because its moments are rounded"):
            optim.chain(tx, optim.scale(0.5))
