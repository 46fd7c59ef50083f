"""The same training of a small Hugging Face model, in float64: by plain torch, and on a mesh."""

from functools import partial

import torch
from torch.func import functional_call

import zerofn
from tests.support.float64_models import build, in_float64
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.parallel import Slice, context, split_sequence, tensor

STEPS = 4
GPT2 = {
    "plan": {
        "transformer.h.*.attn.c_attn": Slice(-2, parts=3, output="cut"),
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
        "transformer.wte": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
    },
    "attributes": {"transformer.h.*.attn": {"split_size": lambda n, ranks: n // ranks}},
}


def batches():
    """Rows of 24 tokens, two of which in each row have no label."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(3, 67, (12, 24), generator=draw)
        labels = ids.clone()
        without = torch.rand(12, 23, generator=draw).argsort(-1)[:, :2] + 1
        found.append({"input_ids": ids, "labels": labels.scatter(1, without, -100)})
    return found


def plain(name):
    """The losses, and the parameters after all steps, of torch on one process."""
    with in_float64():
        model, losses = build(name), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        for batch in batches():
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {k: v.detach() for k, v in model.named_parameters()}


def trained(name, sizes, stage, captured=True, method="ulysses"):
    """The losses, the parameters after all steps, and the number of elements that a rank holds."""
    with in_float64():
        mesh = Mesh.make(**sizes)
        model = zerofn.skeleton(partial(build, name))
        cuts = tensor(model, mesh, **(GPT2 if name == "gpt2" else {})) if mesh.size("tensor") > 1 else None
        if mesh.size("context") > 1:
            context(model, mesh, method=method)

        def init_state():
            return zerofn.TrainState.create(params=dict(build(name).named_parameters()), tx=optim.sgd(0.1, 0.9))

        def loss_fn(params, batch):
            return functional_call(model, params, (), batch).loss

        def train_step(state, batch):
            loss, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads), loss

        state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts)
        step, losses = zerofn.compile(train_step) if captured else train_step, []
        for batch in batches():
            own = {k: x.chunk(mesh.rows.size)[mesh.rows.rank] for k, x in batch.items()}
            if mesh.size("context") > 1:
                own = split_sequence(own, mesh)
            state, loss = step(state, own)
            losses.append(loss.item())
        held = sum(x.numel() for x in state.params.shards)
        return losses, zerofn.unshard(state.params), held


def assert_same_training(found, expected):
    """`found`: of each rank, what `trained` returns; `expected`: what `plain` does."""
    losses, params = expected
    largest = max(x.abs().max() for x in params.values())
    for mine, ours, _ in found:
        for a, b in zip(mine, losses, strict=True):
            assert abs(a - b) <= 1e-12 * abs(b)
        for key, x in params.items():
            assert (ours[key] - x).abs().max() <= 1e-12 * largest, key
