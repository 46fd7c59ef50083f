"""Unmodified models whose experts ranks share, beside plain torch on the global batch in float64."""

import re
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call

import zerofn
from benchmarks.mesh.float64_models import build, in_float64
from benchmarks.mesh.training import assert_same_training, batches, plain, trained
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from zerofn import moe, optim, parallel
from zerofn.comm.mesh import Mesh

whole = pytest.mark.whole
CASES = [
    pytest.param("mixtral", 2, {"expert": 2}, 3, marks=whole),
    pytest.param("mixtral", 2, {"expert": 2}, 0, marks=whole),
    pytest.param("mixtral", 3, {"expert": 3}, 2, marks=whole),
    pytest.param("qwen3_moe", 2, {"expert": 2}, 2, marks=whole),
    pytest.param("qwen3_moe", 3, {"expert": 3}, 1, marks=whole),
    pytest.param("qwen3_moe", 4, {"data": 2, "expert": 2}, 3, marks=whole),
    ("deepseek_v3", 2, {"expert": 2}, 0),
    pytest.param("deepseek_v3", 4, {"expert": 2, "replicate": 2}, 3, marks=whole),
    pytest.param("mixtral", 4, {"expert": 2, "tensor": 2}, 3, marks=whole),  # experts of one's own: test_cuts.py
    pytest.param("deepseek_v3", 4, {"expert": 2, "tensor": 2}, 0, marks=whole),
    pytest.param("mixtral", 4, {"expert": 2, "context": 2}, 2, marks=whole),
    pytest.param("mixtral, balanced", 4, {"data": 2, "expert": 2}, 3, marks=pytest.mark.whole),
    pytest.param("mixtral, balanced", 2, {"data": 2, "expert": 1}, 0, marks=whole),
]


@pytest.mark.parametrize(("name", "num_ranks", "sizes", "stage"), CASES)
def test_models_are_those_of_plain_torch(ranks, name, num_ranks, sizes, stage):
    assert_same_training(ranks(num_ranks, trained, name, sizes, stage), plain(name))


@pytest.mark.whole
def test_eager_steps_have_the_bits_of_captured_ones(ranks):
    eager, captured = (ranks(2, trained, "mixtral", {"expert": 2}, 3, x) for x in (False, True))
    assert_same_training(captured, plain("mixtral"))
    for (a, x, _), (b, y, _) in zip(eager, captured, strict=True):
        assert a == b and all(torch.equal(x[k], y[k]) for k in x)


def with_microbatches():
    return trained("qwen3_moe", {"expert": 2}, 2, num_microbatches=3)


@whole  # test_cuts.py has microbatches of experts
def test_microbatches_are_the_whole_batch(ranks):
    assert_same_training(ranks(2, with_microbatches), plain("qwen3_moe"))


def variants(folder):
    """The same training with activations made again, the least memory, and state on drives: (losses, parameters)."""

    def run(**options):
        return trained("mixtral", {"expert": 2}, 3, **options)[:2]

    with pytest.raises(MemoryError) as told:
        run(compiles={"memory": 1})
    least = int(re.search("at least ([0-9,]+) bytes", str(told.value))[1].replace(",", ""))
    on_drives = zerofn.Offload(optimizer="nvme", params="nvme", path=folder)
    return [run(), run(compiles={"remat": "full"}), run(compiles={"memory": least}), run(shards={"offload": on_drives})]


@whole
def test_recomputation_budgets_and_drives_keep_the_bits(ranks, tmp_path):
    for (losses, params), *others in ranks(2, variants, tmp_path):
        for again, ours in others:
            assert again == losses
            assert_same_trees(ours, params)


def test_a_rank_holds_its_experts_and_all_of_the_rest():
    mesh = Mesh.planned({"expert": 2})
    cuts, whole = moe.experts(zerofn.skeleton(small), mesh), dict(small().named_parameters())
    of_experts = sum(x.numel() for name, x in whole.items() if ".experts." in name)
    rest = sum(x.numel() for x in whole.values()) - of_experts
    held = sum(x.numel() * cuts[k].length(0) // 4 if k in cuts else x.numel() for k, x in whole.items())
    assert held == of_experts // 2 + rest


def test_tensor_parallelism_cuts_within_experts():
    mesh = Mesh.planned({"expert": 2, "tensor": 3})
    model = zerofn.skeleton(partial(build, "mixtral"))
    found = parallel.tensor(model, mesh) | moe.experts(model, mesh)
    cuts = found["model.layers.0.mlp.experts.gate_up_proj"]
    assert [(x.axis, x.dim, x.length(0)) for x in cuts] == [("expert", 0, 3), ("tensor", 1, 24)]
    assert found["model.layers.0.self_attn.q_proj.weight"].axis == "tensor"


def test_tensor_parallelism_of_attention_alone_leaves_experts_whole():
    mesh = Mesh.planned({"expert": 2, "tensor": 2})
    model = zerofn.skeleton(partial(build, "mixtral"))
    plan = {f"model.layers.*.self_attn.{x}_proj": "colwise" for x in "qkv"}
    plan["model.layers.*.self_attn.o_proj"] = "rowwise"
    found = parallel.tensor(model, mesh, plan) | moe.experts(model, mesh)
    assert found["model.layers.0.mlp.experts.gate_up_proj"].axis == "expert"


def of_parts(params, batch, model):
    """The sum over a rank's labels, and their number; the choices that each layer has dropped."""
    with moe.dropped() as counts:
        logits = functional_call(model, params, (), {"input_ids": batch["input_ids"]}).logits
    return losses_of(logits, batch["labels"]), torch.stack(counts)


def losses_of(logits, labels):
    total = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total, (labels[:, 1:] != -100).sum()


def with_labels_of_odd_rows(k):
    """A batch, of which ranks have different numbers of labels."""
    batch = batches()[k]
    return {**batch, "labels": batch["labels"].masked_fill(torch.arange(12).view(-1, 1) % 5 < 2, -100)}


def dropping(capacity, sizes, stage, captured):
    with in_float64():
        mesh = Mesh.make(**sizes)
        model = zerofn.skeleton(partial(build, "mixtral"))
        cuts = moe.experts(model, mesh, capacity=capacity)

        def init_state():
            return zerofn.TrainState.create(params=dict(build("mixtral").named_parameters()), tx=optim.sgd(0.1, 0.9))

        def loss_fn(params, batch):
            (total, weight), counts = of_parts(params, batch, model)
            return (total, weight), counts

        def train_step(state, batch):
            (loss, counts), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)
            return state.apply_gradients(grads), (loss, counts)

        state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts or None)
        step, told = zerofn.compile(train_step) if captured else train_step, []
        for k in range(3):
            own = {key: x.chunk(mesh.rows.size)[mesh.rows.rank] for key, x in with_labels_of_odd_rows(k).items()}
            state, (loss, counts) = step(state, own)
            told.append((loss.item(), counts.tolist()))
        return told, zerofn.unshard(state.params)


def plain_experts(module, capacity, dropped, hidden, index, weights):
    """Experts by a loop over choices, those with the largest weights first, as long as there are places."""
    num_tokens, k = index.shape
    room = [-(-round(capacity * 100) * k * num_tokens // (100 * len(module.down_proj)))] * len(module.down_proj)
    rows, lost = [0] * num_tokens, 0
    for s, c in sorted(((s, c) for c in range(k) for s in range(num_tokens)), key=lambda x: -weights[x].item()):
        e = index[s, c].item()
        if not room[e]:
            lost += 1
            continue
        room[e] -= 1
        gate, up = (module.gate_up_proj[e] @ hidden[s]).chunk(2)
        rows[s] = rows[s] + weights[s, c] * (module.down_proj[e] @ (nn.functional.silu(gate) * up))
    dropped.append(lost)
    return torch.stack([x if isinstance(x, torch.Tensor) else torch.zeros_like(hidden[0]) for x in rows])


def plain_dropping(capacity, size):
    """For each step the loss of the global batch and what each rank drops; the parameters after all steps."""
    with in_float64():
        model, told = build("mixtral"), []
        dropped = []
        for layer in model.model.layers:
            layer.mlp.experts.forward = partial(plain_experts, layer.mlp.experts, capacity, dropped)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        for k in range(3):
            dropped.clear()
            parts = [x.chunk(size) for x in with_labels_of_odd_rows(k).values()]
            found = [losses_of(model(ids).logits, labels) for ids, labels in zip(*parts, strict=True)]
            loss = sum(x for x, _ in found) / sum(x for _, x in found)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_layers = len(model.model.layers)
            told.append((loss.item(), [dropped[r * num_layers : (r + 1) * num_layers] for r in range(size)]))
        return told, {name: x.detach() for name, x in model.named_parameters()}


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "capacity", "stage", "captured"),
    [
        (2, {"expert": 2}, 0.75, 3, True),
        pytest.param(2, {"data": 2, "expert": 1}, 0.75, 1, True, marks=whole),
        pytest.param(3, {"expert": 3}, 1.25, 0, False, marks=whole),
    ],
)
def test_a_capacity_drops_the_smallest_weights_and_tells_how_many(ranks, num_ranks, sizes, capacity, stage, captured):
    expected, params = plain_dropping(capacity, num_ranks)
    assert any(any(x) for _, lost in expected for x in lost)
    largest = max(x.abs().max() for x in params.values())
    for rank, (told, ours) in enumerate(ranks(num_ranks, dropping, capacity, sizes, stage, captured)):
        for (loss, counts), (theirs, lost) in zip(told, expected, strict=True):
            assert abs(loss - theirs) <= 1e-12 * theirs
            assert counts == lost[rank]
        for name, x in params.items():
            assert (ours[name] - x).abs().max() <= 1e-12 * largest, name


def small(**options):
    config = transformers.MixtralConfig(
        vocab_size=67, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=8, num_local_experts=4, num_experts_per_tok=2, use_cache=False, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def by_default(sizes, num_rows=2, capacity=None, captured=True, **options):
    """A step in float32, with what transformers takes if nobody chooses, and its plan."""
    mesh = Mesh.make(**sizes)
    model = zerofn.skeleton(partial(small, **options))
    cuts = moe.experts(model, mesh, capacity=capacity) if "expert" in sizes else None

    def init_state():
        return zerofn.TrainState.create(params=dict(small(**options).named_parameters()), tx=optim.sgd(0.1))

    train_step = step_with(lambda params, x: functional_call(model, params, (), x).loss)

    state = zerofn.shard(init_state, stage=3, mesh=mesh, cuts=cuts)
    rows = torch.arange(4 * 8).view(4, 8)[mesh.rows.rank :: mesh.rows.size][:num_rows]
    batch = {"input_ids": rows, "labels": rows}
    step = zerofn.compile(train_step) if captured else train_step
    state, loss = step(state, batch)
    sent = [(x.what, x.nbytes, n) for x, n in step.lower(state, batch).collectives().items()] if captured else []
    return loss.item(), zerofn.unshard(state.params), [x for x in sent if x[1] > 200]


def test_the_models_own_choice_of_kernels_is_captured(ranks):
    (loss, params, _), *_ = ranks(1, by_default, {"data": 1}, 4)
    for mine, ours, _ in ranks(2, by_default, {"expert": 2}):
        assert mine == pytest.approx(loss, rel=1e-6)
        for name, x in params.items():
            torch.testing.assert_close(ours[name], x, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.part(capacity=[1.0])
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_one_rank_of_all_axes_is_not_warned(capacity):
    """Nothing differs from rank to rank, so that more ranks would not be refused."""
    loss, params, _ = by_default({"data": -1, "expert": 1, "context": 1}, 2, capacity)
    assert torch.isfinite(torch.tensor(loss)) and params.keys() == dict(small().named_parameters()).keys()


TOKENS, WIDTH = 16, 16  # of a rank; 4 bytes each


def test_the_plan_has_the_bytes_of_both_ways(ranks):
    """To two ranks: forwards, and their gradients back. Without a capacity tokens and, of 8 bytes each, their experts
    are sent to all; with one, a row for each place of the experts of others.
    """
    nbytes = 4 * TOKENS * WIDTH
    for *_, sent in ranks(2, by_default, {"expert": 2}):
        assert ("all_gather", nbytes, 2) in sent and ("reduce_scatter", nbytes, 2) in sent
        assert ("all_gather", 8 * TOKENS * 2, 1) in sent
    places = 0.5 * 2 * TOKENS / 4
    for *_, sent in ranks(2, by_default, {"expert": 2}, 2, 0.5):
        assert [x for x in sent if x[0] == "exchange"] == [("exchange", int(2 * places * 4 * WIDTH), 4)]


def other_numbers_of_rows(captured):
    by_default({"expert": 2}, 1 + torch.distributed.get_rank(), captured=captured)


@pytest.mark.part(captured=[True])
@pytest.mark.parametrize(
    ("captured", "message"), [(True, "Every rank's batch must have the same shapes"), (False, "ranks are out of step")]
)
def test_ranks_with_other_numbers_of_rows_are_told(ranks, captured, message):
    for found in ranks(2, other_numbers_of_rows, captured, expect_errors=True):
        assert message in found.message


class Foreign(nn.Module):
    """Experts that are no transformers' ones."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.up = 4, nn.Parameter(torch.zeros(4, 2, 2))


PLAN = {"model.layers.*.mlp.experts": "ep_dispatch_experts", "model.layers.*.mlp.experts.*": "grouped_gemm"}
EXPERTS, UP = "model.layers.*.mlp.experts", "model.layers.*.mlp.experts.gate_up_proj"


def test_mistakes_are_sentences():
    two, three = Mesh.planned({"expert": 2}), Mesh.planned({"expert": 3})
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=7, num_hidden_layers=1, **sizes))
    bad = [
        (lambda: moe.experts(small(), Mesh.planned({"data": 2})), "mesh has no axis 'expert'"),
        (lambda: moe.experts(llama, two), "LlamaForCausalLM has no ep_plan"),
        (lambda: moe.experts(small(), three), "'model.layers.0.mlp.experts' has 4 experts, which 3 ranks"),
        (lambda: moe.experts(small(), two, {UP: "grouped_gem"}), "'grouped_gem' is not a word.*mean 'grouped_gemm'"),
        (lambda: moe.experts(small(), two, {UP: "moe_tp_experts"}), "a word of tp_plan. Leave it out"),
        (lambda: moe.experts(small(), two, {UP: 3}), "=3 is not a word for experts; expected one of grouped_gemm"),
        (lambda: moe.experts(small(), two, {UP + "s": "grouped_gemm"}), "matches no parameter; did you mean"),
        (lambda: moe.experts(small(), two, {UP: "ep_dispatch_experts"}), "matches no module; did you mean"),
        (lambda: moe.experts(small(), two, {**PLAN, UP: "grouped_gemm"}), "both match.*leave one out"),
        (lambda: moe.experts(small(), two, {UP: "grouped_gemm"}), "but not its module. Add 'model.layers.0.mlp.exp"),
        (lambda: moe.experts(small(), two, {EXPERTS: "ep_dispatch_experts"}), "the plan has no entry for it. Write"),
        (lambda: moe.experts(small(), two, {EXPERTS: "ep_dispatch_experts", UP: "grouped_gemm"}), "down_proj' has sha"),
        (lambda: moe.experts(small(), two, {}), "matches none of its modules of experts"),
        (lambda: moe.experts(nn.Sequential(Foreign()), two, {"0": "ep_dispatch_experts", "0.up": "grouped_gemm"}),
         "a Foreign, which does not follow the conventions of experts in transformers"),
        *[
            (lambda factor=factor: moe.experts(small(), two, capacity=factor), "must be a factor above 0")
            for factor in (0, -1.0, float("inf"), True, "1")
        ],
    ]  # fmt: skip
    for call, message in bad:
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_a_model_is_shared_once_and_after_it_was_cut():
    mesh = Mesh.planned({"expert": 2, "tensor": 2})
    model = small()
    parallel.tensor(model, mesh)
    moe.experts(model, mesh)
    with pytest.raises(ValueError, match="already divided over ranks. Make a new skeleton"):
        moe.experts(model, mesh)
    model = small()
    moe.experts(model, mesh)
    with pytest.raises(ValueError, match="Call zerofn.parallel.tensor first"):
        parallel.tensor(model, mesh)


def masked():
    mesh = Mesh.make(data=2, expert=1)
    model = small(output_router_logits=True)
    moe.experts(model, mesh)
    rows = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="the load-balance loss of .* weighs tokens of all ranks by attention_mask"):
        model(input_ids=rows, attention_mask=rows)


def test_a_load_balance_loss_takes_no_mask(ranks):
    ranks(2, masked)
