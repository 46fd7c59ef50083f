"""One capture of a step: its program and, from the first run on, its memory and its runner."""

from __future__ import annotations

import json
import weakref
from typing import Any, NamedTuple

import torch

from ..comm.channel_groups import Channel, ChannelGroups
from ..comm.channels import channel_of
from ..comm.transport import is_gloo
from ..graph.messages import message_ends
from ..graph.nested import graphs_of
from ..graph.node_kinds import argument, is_ours
from ..graph.program import Program, tensor_of
from ..graph.resident import resident
from ..job.agreement import agree_on, exchange
from ..job.failures import abandon
from ..job.step_order import digest_of
from ..memory.device_allocator import hold
from ..ops.registry import argument_places
from ..tree import PyTreeSpec
from ..util.errors import said
from ..util.process import the
from .agreed_captures import AgreedStep
from .backend import Backend, Runner
from .buffers import Buffers


class CapturedStep:
    """A scheduled program and, once `bind` was called, its buffers and its runner.

    `agreed`: the text that all ranks agreed on at its capture; `digest` is of it. `groups`: the names of the process
    groups in which it communicates. `step`: what ranks have agreed on, or None if this rank has captured it `alone`.
    """

    buffers: Buffers
    runner: Runner

    def __init__(self, program: Program, donating: bool, backend: Backend, agreed: str) -> None:
        self.program, self.donating, self.backend, self._agreed = program, donating, backend, agreed
        self.digest, self.groups = digest_of(agreed), _groups(program)
        self._bound = self.alone = False
        self.step: AgreedStep | None = None

    def bind(self) -> None:
        """Allocate the buffers and let the backend make the runner, at the first call. All ranks must call it.

        If it fails on one rank, all ranks raise that rank's message, and the next call tries again.
        """
        if self.alone and not self._bound:
            try:
                self._bind()
            except Exception as error:  # the others wait in their steps
                abandon(f"zerofn.compile({self.program.name}) failed: {said(error)}")
                raise
        elif not self._bound:
            agree_on(f"zerofn.compile({self.program.name})", self._bind)
            agree_on_regions(self.runner, self.program.name)
            open_channels(self.program)
        self._bound = True

    def _bind(self) -> tuple[None, str]:
        if not hasattr(self, "buffers"):
            _hold(self.program)
            buffers = Buffers(self.program)
            buffers.bind(self.program.gm)
            self.buffers = buffers
        if not hasattr(self, "runner"):
            self.runner = self.backend.bind(self.program)
            self._closing = weakref.finalize(self, self.runner.close)
        # The same as at capture: if a rank later waits in vain, its error reports what the other ranks said last.
        return None, self._agreed

    def close(self) -> None:
        """Close the runner now, rather than when the entry is garbage-collected. Calling it again is harmless."""
        if hasattr(self, "_closing"):
            self._closing()

    @property
    def wrote(self) -> bool:
        """Whether the last run may have written to its inputs."""
        return getattr(self.runner, "wrote", True)


def agree_on_regions(runner: Any, name: str) -> None:
    """Let ranks run the same regions compiled: what one of them leaves out, all leave out."""
    if hasattr(runner, "leave_out"):
        theirs = exchange(f"regions of zerofn.compile({name})", " ".join(sorted(runner.left_out)))
        runner.leave_out({x for text in theirs for x in text.split()})


def open_channels(program: Program) -> None:
    """Make the groups in which devices send messages from stage to stage. All ranks must call it."""
    if program.mesh is None or program.mesh.stages.size == 1:
        return
    ends: dict[Channel, torch.device] = {}
    for end in message_ends(program.gm.graph):
        if not is_gloo(end.group, end.value):
            ends[channel_of(end.group, end.peer, sends=end.sends)] = end.value.device
    told = exchange(f"channels of zerofn.compile({program.name})", json.dumps([*ends]))
    device = next(iter(ends.values()), torch.device("cpu"))
    the(ChannelGroups).open({(a, b) for text in told for a, b in json.loads(text)}, device)


class StepCall(NamedTuple):
    """A step's flat arguments, and the entry for them."""

    entry: CapturedStep
    state_leaves: list[Any]
    state_def: PyTreeSpec
    batch_leaves: list[Any]


def _hold(program: Program) -> None:
    """Tell the allocators of the step's devices its budget."""
    found = resident(program).device
    there = found["state"] + found["gathered"] + found["other"]
    for device in {x.device for x in map(tensor_of, program.placeholders) if x is not None}:
        hold(device, program.budget, there)


def _groups(program: Program) -> list[str]:
    nodes = (n for gm in graphs_of(program.gm) for n in gm.graph.nodes)
    return list(
        dict.fromkeys(argument(n, "group") for n in nodes if is_ours(n) and "group" in argument_places(n.target))
    )
