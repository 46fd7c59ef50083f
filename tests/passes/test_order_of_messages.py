"""The messages of scheduled steps, as each rank has captured its own, run by NCCL's rules: no rank gets stuck."""

import functools

import pytest
import torch
import transformers as hf
from torch.func import functional_call

import zerofn
from benchmarks.mesh.training import on_stages_of
from tests.support.rendezvous import OTHERS, steps_of, stream_of, stuck
from tests.support.small_steps import batch_of, build, captured, fake_ranks, layers_on_stages, loss_of
from zerofn import optim, passes
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import on_stages
from zerofn.graph.messages import message_ends
from zerofn.graph.node_kinds import wait_of
from zerofn.passes._checked import order_of_messages
from zerofn.schedules import NAMES, Receive, Send, make

_SIZES = {"vocab_size": 31, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}


@functools.cache
def _model(name, layers):
    torch.manual_seed(0)
    if name == "t5":  # the output of the encoder goes to every stage of the decoder
        sizes = {"vocab_size": 31, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_heads": 2, "use_cache": False}
        half = hf.T5Config(**sizes, num_layers=layers // 2, dropout_rate=0.0, decoder_start_token_id=0)
        return hf.T5ForConditionalGeneration(half)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, num_hidden_layers=layers, use_cache=False))


def graphs_of(name, p, schedule, m, behind=lambda program: None):
    """The scheduled graph of each rank. `behind`: looks at the program, or changes it, behind `cut_stages`."""
    layers = max(2, make(schedule, p, 1).placement.num_stages)
    layers, found = layers + layers % 2, []
    for rank in range(p):
        with fake_ranks(p, rank):
            mesh = Mesh.make(pipe=p)
            if name == "layers":
                module, cuts = build(layers), layers_on_stages(layers, p, schedule)
                loss_fn, batch = loss_of(module), batch_of(rows=m)
            else:
                module, ids = _model(name, layers), torch.ones(m, 6, dtype=torch.int64)
                loss_fn, batch = _loss_of(module), {"input_ids": ids, "labels": ids}
                cuts = _shared(on_stages_of(module, mesh, {}, schedule))
            whole = zerofn.TrainState.create(params=dict(module.named_parameters()), tx=optim.sgd(0.1, 0.9))
            state = zerofn.shard(whole, stage=1, mesh=mesh, cuts=cuts)
            program = captured(_step(loss_fn, m), state, batch)
            edit = passes.after("cut_stages", passes.Pass(behind, name="behind"))
            for each in edit(passes.standard(donating=True)):
                each(program)
            found.append(program.gm.graph)
    return found


def _shared(cuts):
    """What T5's stacks share lies on all stages of its stack, and the embedding on all of both."""
    for stack, word in (("encoder", "relative"), ("decoder", "relative"), ("", "shared")):
        inside = [cut for leaf, (cut,) in cuts.items() if leaf.startswith(stack)]
        for leaf, (cut,) in cuts.items():
            if leaf.startswith(stack) and word in leaf:
                stages = {s for each in inside for s in each.stages}
                cuts[leaf] = (on_stages(cut.pipeline, cut.dim, cut.size, stages),)
    return cuts


def _loss_of(model):
    return lambda params, batch: functional_call(model, params, (), dict(batch)).loss


def _step(loss_fn, m):
    def step(state, batch):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), m)(batch)
        return state.apply_gradients(grads), loss

    return step


def programs_of(graphs):
    return [steps_of(graph, rank, len(graphs)) for rank, graph in enumerate(graphs)]


def assert_nobody_gets_stuck(name, p, schedule, m):
    before = []
    graphs = graphs_of(name, p, schedule, m, lambda program: before.append(order_of_messages(program.gm.graph)))
    programs = programs_of(graphs)
    assert stuck(programs, stream_of) == [], (name, p, schedule, m)
    sent, received = ({} for _ in range(2))
    for steps in programs:
        for step in steps:
            if isinstance(step, Send | Receive) and step.message.edge.name != OTHERS:
                ends = sent if isinstance(step, Send) else received
                ends.setdefault(step.message.channel, []).append(step.message.edge.name)
    assert sent == received and sent
    for (posted, waits), graph in zip(before, graphs, strict=True):  # passes behind move what computes, or nothing
        now, waits_now = order_of_messages(graph)
        assert now == posted and all(waits_now[x] >= n for x, n in waits.items())
    return programs


CASES = [("layers", 2, "zbv", 3), ("layers", 3, "interleaved", 2), ("layers", 3, "zb-h1", 1)]
WHOLE = [
    (name, p, schedule, m)
    for name in ("layers", "llama", "t5")
    for p in (2, 3, 4)
    for schedule in NAMES
    for m in (1, 2, 3, 4, 5, 8)
    if (name, p, schedule, m) not in CASES and (name == "layers" or m == 3 + p % 2)
]


@pytest.mark.parametrize(
    ("name", "p", "schedule", "m"), [*CASES, *(pytest.param(*x, marks=pytest.mark.whole) for x in WHOLE)]
)
def test_no_rank_gets_stuck(name, p, schedule, m):
    assert_nobody_gets_stuck(name, p, schedule, m)


def received_late(program):
    """Each receive right before its wait."""
    for end in [*message_ends(program.gm.graph)]:
        if not end.sends:
            wait_of(end.node).prepend(end.node)


def test_received_where_they_are_used_ranks_get_stuck():
    """What the test above would find."""
    assert stuck(programs_of(graphs_of("layers", 2, "zbv", 4, received_late)), stream_of)


def test_one_stream_for_both_directions_gets_stuck():
    programs = programs_of(graphs_of("layers", 2, "1f1b", 4))
    assert not stuck(programs, stream_of)
    assert stuck(programs, lambda message: "one")
