"""The same training of a small Hugging Face model, in float64: by plain torch, and on a mesh."""

import re
from functools import cache, partial

import torch
from torch.func import functional_call

import zerofn
from benchmarks.mesh.float64_models import build, in_float64
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import Pipeline, on_stages
from zerofn.moe import experts
from zerofn.parallel import Slice, context, split_sequence, tensor
from zerofn.schedules import make

STEPS = 5
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

_HEADS = {"n_heads": lambda n, ranks: n // ranks, "inner_dim": lambda n, ranks: n // ranks}
T5 = {
    "plan": {
        **{f"*.block.*.layer.*.{kind}.{x}": "colwise" for kind in ("SelfAttention", "EncDecAttention") for x in "qkv"},
        **{f"*.block.*.layer.*.{kind}.o": "rowwise" for kind in ("SelfAttention", "EncDecAttention")},
        "*.block.*.layer.*.SelfAttention.relative_attention_bias": Slice(1, kind="embedding", output="cut"),
        "*.block.*.layer.*.DenseReluDense.wi": "colwise",
        "*.block.*.layer.*.DenseReluDense.wo": "rowwise",
    },
    "attributes": {f"*.block.*.layer.*.{kind}": _HEADS for kind in ("SelfAttention", "EncDecAttention")},
}
BERT = {
    "plan": {
        **{f"bert.encoder.layer.*.attention.self.{x}": "colwise" for x in ("query", "key", "value")},
        "bert.encoder.layer.*.attention.output.dense": "rowwise",
        "bert.encoder.layer.*.intermediate.dense": "colwise",
        "bert.encoder.layer.*.output.dense": "rowwise",
        "bert.embeddings.word_embeddings": "embedding_rowwise",
        "cls.predictions.decoder": "colwise_gather_output",
    }
}
PLANS = {"gpt2": GPT2, "t5": T5, "bert": BERT}  # the others have their own
LAYERS = {"gpt2": "transformer.h.*", "bert": "bert.encoder.layer.*"}  # the others': model.layers.*


def cuts_of(name, model, mesh, in_parts=False):
    """The cuts of a model by its plan. `in_parts`: layers have parts of the tokens, and heads part of the logits."""
    made = dict(PLANS.get(name, {"plan": model.tp_plan}))
    if in_parts:
        head = {} if name == "bert" else {"lm_head": "colwise"}
        made["plan"] = {**made["plan"], LAYERS.get(name, "model.layers.*"): "sequence_parallel", **head}
    return tensor(model, mesh, **made)


def on_stages_of(model, mesh, cuts, schedule="1f1b", chunks=None):
    """Cuts with a stage for each leaf: whole layers, as equally as can be, what comes before them with the first, what
    comes behind with the last; an embedding that is tied to the head on both.
    """
    placement = make(schedule, mesh.size("pipe"), 1, chunks).placement
    params, num, found, at = dict(model.named_parameters()), placement.num_stages, {}, 0
    layer = lambda name: name[: m.end()] if (m := re.search(r"\.\d+\.", name)) else None  # noqa: E731
    layers = list(dict.fromkeys(filter(None, map(layer, params))))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, x in params.items():
        own = [cuts[name]] if name in cuts else []
        at = layers.index(layer(name)) if layer(name) else at
        stages = {at * num // len(layers)}
        if tied and x is model.get_input_embeddings().weight:
            stages.add(num - 1)
        found[name] = (*own, on_stages(Pipeline(placement, schedule), 0, x.shape[0], stages))
    return found


def batches(device="cpu"):
    """Rows of 24 tokens, two of which in each row have no label."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(3, 67, (12, 24), generator=draw)
        labels = ids.clone()
        without = torch.rand(12, 23, generator=draw).argsort(-1)[:, :2] + 1
        batch = {"input_ids": ids, "labels": labels.scatter(1, without, -100)}
        found.append({k: x.to(device) for k, x in batch.items()})
    return found


@cache
def plain(name, device="cpu"):
    """The losses, and the parameters after all steps, of torch on one process."""
    with in_float64():
        model, losses = build(name).to(device), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        for batch in batches(device):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {k: v.detach() for k, v in model.named_parameters()}


def trained(
    name,
    sizes,
    stage,
    captured=True,
    method="ulysses",
    num_microbatches=1,
    weighted=False,
    shards=None,
    compiles=None,
    in_parts=False,
    device="cpu",
    pipe=None,
    chosen=None,
):
    """The losses, the parameters after all steps, and the number of elements that a rank holds. `pipe`: how stages are
    dealt out by `on_stages_of`; `chosen`: what `zerofn.parallel.pipe` is told, which chooses them instead.
    """
    with in_float64():
        mesh = Mesh.make(**sizes)
        model = zerofn.skeleton(partial(build, name), device=device)
        cuts = cuts_of(name, model, mesh, in_parts) if mesh.size("tensor") > 1 else {}
        if "expert" in sizes:
            cuts |= experts(model, mesh)
        if "pipe" in sizes and chosen is None:
            cuts = on_stages_of(model, mesh, cuts, **(pipe or {}))
        if "context" in sizes:
            context(model, mesh, method=method)

        def init_state():
            return zerofn.TrainState.create(params=dict(build(name).named_parameters()), tx=optim.sgd(0.1, 0.9))

        def of_sum(params, batch):
            """(the sum over a rank's tokens, their number), as a loss of one's own may be."""
            labels = batch["shift_labels"]
            inputs = {k: x for k, x in batch.items() if k not in ("labels", "shift_labels")}
            logits = functional_call(model, params, (), inputs).logits
            total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return total, (labels != -100).sum()

        def loss_fn(params, batch):
            if weighted:
                return of_sum(params, batch)
            if name != "bert" or "context" not in sizes:
                return functional_call(model, params, (), batch).loss
            labels = batch["labels"]  # its own loss does not know parts of sequences
            inputs = {k: x for k, x in batch.items() if k != "labels"}
            logits = functional_call(model, params, (), inputs).logits
            total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return mesh.size("context") * total / batch["items_per_row"].sum()

        if chosen is not None:
            cuts = zerofn.parallel.pipe(model, mesh, loss_fn, batches(device)[0], cuts=cuts, **chosen)

        def train_step(state, batch):
            loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), num_microbatches)(batch)
            return state.apply_gradients(grads), loss

        state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts or None, device=device, **(shards or {}))
        step, losses = zerofn.compile(train_step, **(compiles or {})) if captured else train_step, []
        for batch in batches(device):
            own = {k: x.chunk(mesh.rows.size)[mesh.rows.rank] for k, x in batch.items()}
            if "context" in sizes:
                own = split_sequence(own, mesh, shift=name != "bert")
            state, loss = step(state, own)
            losses.append(loss.item())
        spec = state.params.spec
        held = sum(b - a for a, b in map(spec.bounds, spec.layout.units))
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
