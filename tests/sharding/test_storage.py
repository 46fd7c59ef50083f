"""How shards are kept: the split master, against an fp32 master with a bf16 copy that is rounded the same way."""

import copy

import numpy as np
import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captures_of, loss_of, scheduled, state_of, train_step_of
from zerofn import optim, tree
from zerofn.ops.codecs import CODECS, Codec
from zerofn.sharding import storage
from zerofn.sharding.storage import StorageSpec

ops, aten = torch.ops.zerofn, torch.ops.aten


def rounded(x):
    """float32 -> bfloat16, nearest, ties away from zero, by exact arithmetic: the neighbour that is nearer."""
    bits = x.detach().numpy().view(np.uint32)
    below, above = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    far = (bits & 0xFFFF) >= 0x8000
    chosen = np.where(np.isnan(x.detach().numpy()), 0x7FC00000, np.where(far, above, below)).astype(np.uint32)
    return torch.from_numpy((chosen >> 16).astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def patterns():
    """Every upper half with lower halves at the edges and between."""
    lower = np.array([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234, 0xABCD], np.uint32)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return torch.from_numpy((upper[:, None] | lower[None]).reshape(-1).view(np.float32))


def test_every_number_comes_back():
    x = patterns()
    hi, lo = ops.split(x)
    back = ops.join(hi, lo)
    nan = x.isnan()
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(back.view(torch.int32)[~nan], x.view(torch.int32)[~nan])
    assert (hi.view(torch.int16)[nan] == 0x7FC0).all() and not lo[nan].any()
    assert torch.equal(hi.view(torch.int16), rounded(x).view(torch.int16))
    assert torch.equal(ops.high(x).view(torch.int16), hi.view(torch.int16))


def test_the_high_half_of_a_master_is_rounded_to_nearest():
    x = torch.randn(1 << 16, dtype=torch.float64).float()
    hi = ops.high(x).double()
    ends = [torch.full((), s * torch.inf, dtype=torch.bfloat16) for s in (-1, 1)]
    other = [torch.nextafter(ops.high(x), end).double() for end in ends]
    assert all(((hi - x).abs() <= (o - x).abs()).all() for o in other)


def plain(module, batches, max_norm, lr):
    """The same training in plain torch: an fp32 master, and a bf16 copy of it that is computed with."""
    names, master = zip(*[(n, p.detach().clone().requires_grad_()) for n, p in module.named_parameters()], strict=True)
    tx = torch.optim.AdamW(master, lr=lr, weight_decay=0.1, fused=True)
    losses = []
    for batch in batches:
        half = {n: rounded(p).requires_grad_() for n, p in zip(names, master, strict=True)}
        loss = loss_of(module)(half, batch).float()
        for p, g in zip(master, torch.autograd.grad(loss, list(half.values())), strict=True):
            p.grad = g.float()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(master, max_norm)
        tx.step()
        losses.append(loss.detach())
    return dict(zip(names, master, strict=True)), losses


def halved(batch):
    return tree.tree_map(lambda x: x.bfloat16() if x.is_floating_point() else x, batch)


@pytest.mark.part(stage=[3])
@pytest.mark.part(stage=[0, 1], max_norm=[0.05])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("stage", range(4))
def test_training_has_the_bits_of_a_whole_master(stage, max_norm):
    module, batches = build(3), [halved(batch_of(0, seed=k)) for k in range(5)]
    clip = [] if max_norm is None else [optim.clip_by_global_norm(max_norm)]
    state = state_of(
        copy.deepcopy(module), stage, optim.chain(*clip, optim.adamw(1e-2, weight_decay=0.1)), precision="bf16"
    )
    step = zerofn.compile(train_step_of(module))
    losses = []
    for batch in batches:
        state, aux = step(state, batch)
        losses.append(aux["loss"])
    expected, theirs = plain(module, batches, max_norm, 1e-2)
    ours = zerofn.unshard(state.params)
    assert_same_trees(losses, theirs)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert any(not torch.equal(p, q) for p, q in zip(module.parameters(), expected.values(), strict=True))


def test_nothing_is_joined_cast_or_copied():
    """The upper half is what is gathered and used, and the rule works on both halves where they lie."""
    module = build(3)
    state = state_of(module, 3, precision="bf16")
    gm = scheduled(train_step_of(module, 2), state, halved(batch_of()), donating=True).gm
    graphs = [gm, *(m for m in gm.children() if isinstance(m, torch.fx.GraphModule))]
    targets = [n.target for g in graphs for n in g.graph.nodes]
    assert len(graphs) == 2 and ops.adamw_.default in targets
    assert not {ops.join.default, ops.split.default, ops.high.default, aten.copy_.default} & set(targets)


def test_four_bytes_for_master_and_parameter():
    for stage in range(4):
        params = state_of(build(3), stage, precision="bf16").params
        assert sum(x.nbytes for x in params.stored) == 4 * sum(u.size for u in params.layout.units)
        assert "in two halves" in repr(params)


def test_other_optimizers_work_on_the_joined_number():
    """A rule that is none of ours: the same bits as on a whole master."""
    module, batch = build(2), halved(batch_of())

    def step(state, batch):
        loss, grads = zerofn.value_and_grad(loss_of(module))(state["params"], batch)
        return {"params": zerofn.tree_map(lambda p, g: p - 0.1 * g, state["params"], grads)}, loss

    state = zerofn.shard({"params": dict(copy.deepcopy(module).named_parameters())}, precision="bf16")
    run = zerofn.compile(step)
    master = {n: p.detach().clone() for n, p in module.named_parameters()}
    for _ in range(3):
        state, _ = run(state, batch)
        half = {n: rounded(p).requires_grad_() for n, p in master.items()}
        grads = torch.autograd.grad(loss_of(module)(half, batch).float(), list(half.values()))
        master = {n: p - 0.1 * g.float() for (n, p), g in zip(master.items(), grads, strict=True)}
    ours = zerofn.unshard(state)["params"]
    assert all(torch.equal(ours[n], master[n]) for n in master)


def test_after_eager_arithmetic_nothing_is_captured_again():
    """A tree that was mapped holds joined numbers; the next compiled step finds halves."""
    module = build(2)
    state, step = state_of(module, 3, precision="bf16"), zerofn.compile(train_step_of(module))
    state, _ = step(state, halved(batch_of()))
    state = tree.tree_map(lambda x: x.clone(), state)
    state, _ = step(state, halved(batch_of()))
    assert len(captures_of(step)) == 1 and all(len(x.parts) == 2 for x in state.params.stored)


def test_functional_call_sees_the_upper_half():
    module = torch.nn.Linear(4, 4)
    params = zerofn.shard({"params": dict(module.named_parameters())}, precision="bf16")["params"]
    x = torch.randn(2, 4).bfloat16()
    expected = functional_call(module, {n: rounded(p) for n, p in module.named_parameters()}, (x,))
    assert torch.equal(functional_call(module, zerofn.gather(params), (x,)), expected)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_large_leaf_is_stored_a_part_at_a_time(monkeypatch, codec):
    """With the bits of the whole one, from an element inside a block on."""
    at_once, encoded, encode = 1024, [], Codec.encode
    monkeypatch.setattr(storage, "_AT_ONCE", at_once)
    monkeypatch.setattr(Codec, "encode", lambda self, x: (encoded.append(x.numel()), encode(self, x))[1])
    torch.manual_seed(0)
    whole = torch.cat([torch.zeros(100), torch.rand(3000), torch.zeros(77)])
    shard = StorageSpec(codec, torch.float32).keep(torch.zeros_like(whole))
    encoded.clear()
    shard.write(100, whole[100:3100])
    assert len(encoded) == 4 and max(encoded) <= at_once
    assert all(map(torch.equal, shard.tensors, encode(codec, whole)))
    shard.write(50, whole[:0])
    assert all(map(torch.equal, shard.tensors, encode(codec, whole)))
