"""Buffers: what passes asked for is allocated once, shared between steps, and graphs refer to it."""

import pytest
import torch
from torch.fx import Graph, GraphModule

from tests.support.small_steps import batch_of, build, captured, fake_ranks, state_of, train_step_of
from zerofn import Offload, optim, passes
from zerofn.graph.buffers import BufferSpec, DriveSpec, add_buffer
from zerofn.graph.edit import copied
from zerofn.memory import arena as arenas
from zerofn.memory.arena import Arenas
from zerofn.offload import drive_tensor
from zerofn.offload.drive_tensor import Handles
from zerofn.runtime.buffers import Buffers
from zerofn.util.process import the

ops = torch.ops.zerofn
CPU = torch.device("cpu")
NORMED = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))


def on_drives(path):
    """(a state on drives, how to schedule a step of it)"""
    module = build(6)
    with fake_ranks(1):
        state = state_of(module, 3, NORMED, offload=Offload(optimizer="nvme", params="nvme", path=path))

    def program():
        with fake_ranks(1):
            return passes.run(captured(train_step_of(module), state, batch_of()), donating=True)

    return state, program


def test_buffers_are_numbered_by_device():
    buffers = []
    assert [add_buffer(buffers, device, 512) for device in (None, CPU, None, CPU)] == [0, 1, 2, 3]
    assert [x.number for x in buffers] == [0, 0, 1, 1]


def test_passes_allocate_nothing_and_graphs_refer_by_index(tmp_path):
    state, scheduled = on_drives(tmp_path)
    before = len(the(Handles).regions)
    program = scheduled()
    assert len(the(Handles).regions) == before and not the(Arenas).shared and state
    assert program.drive_space and all(isinstance(x, DriveSpec) for x in program.drive_space)
    assert all(isinstance(x, BufferSpec) for x in program.buffers)
    handles = [n.args[0] for n in program.gm.graph.nodes if n.target is ops.drive_handle.default]
    assert sorted(handles) == list(range(len(program.drive_space)))
    places = [n.args[3][0] for n in program.gm.graph.nodes if n.target is ops.fetch.default]
    assert set(places) <= set(range(len(program.buffers)))


def test_a_bound_graph_refers_to_what_was_allocated(tmp_path):
    state, scheduled = on_drives(tmp_path)
    program = scheduled()
    buffers, gm = Buffers(program), copied(program.gm)
    buffers.bind(gm)
    pairs = list(zip(program.gm.graph.nodes, gm.graph.nodes, strict=True))
    for planned, bound in pairs:
        if planned.target is ops.drive_handle.default:
            region = drive_tensor.region_of(torch.tensor([bound.args[0]]))
            spec = program.drive_space[planned.args[0]]
            assert region is buffers.regions[planned.args[0]] and (region.nbytes, region.label) == (
                spec.nbytes,
                spec.label,
            )
        if planned.target is ops.fetch.default:
            assert bound.args[3] == [buffers.arenas[planned.args[3][0]].number, planned.args[3][1]]
    again = Buffers(program)
    assert state and again.arenas == buffers.arenas and again.regions is buffers.regions


def test_what_others_call_place_is_left_alone():
    graph = Graph()
    x = graph.placeholder("x")
    out = graph.call_function(ops.grid.default, ([x], [1], 1, 2))
    graph.output([out])
    gm = GraphModule(torch.nn.Module(), graph)
    made = Buffers.__new__(Buffers)
    made.arenas, made.regions = [arenas.Arena(512, CPU)], []
    made.bind(gm)
    assert out.args == ([x], [1], 1, 2)


@pytest.mark.parametrize("exactly", [True, False])
def test_what_another_step_needs_is_kept_unless_a_budget_is_to_be_kept(exactly):
    class Program:
        drive_space = ()

        def __init__(self, nbytes):
            self.buffers = [BufferSpec(CPU, 0, nbytes)]

    large, small = Buffers(Program(1 << 20)), Buffers(Program(1 << 16))
    assert large.arenas == small.arenas
    small.reserve(exactly)
    assert small.arenas[0].nbytes == (1 << 16 if exactly else 1 << 20)
    large.reserve(False)
    assert large.arenas[0].nbytes == 1 << 20
