"""Copy outputs, so that a step without donation returns memory of its own."""

from __future__ import annotations

from torch.fx import Node

from ..capture.capture import CaptureError
from ..graph.alias import is_given, is_lent, roots
from ..graph.edit import clean, copy_of
from ..graph.program import Program, ShardedInput


def copy_outputs(program: Program) -> None:
    """Copy outputs that share memory with an input, with another entry of the new state, or with a static buffer.

    Both the old and the new state stay usable, so neither may change when a later step writes to the other. The next
    step overwrites static buffers. The pass replaces `donate` and the passes that need in-place updates. Raises
    `CaptureError` if state is on a drive: the old and the new state would share its place.
    """
    gm = program.gm
    root = roots(gm.graph)
    outputs = list(program.output.args[0])  # type: ignore[arg-type]
    for name, tier, value in zip(program.state.names, _tiers(program), outputs[: program.num_new], strict=False):
        if tier == "nvme" and value.op == "placeholder":
            raise CaptureError(
                f"{name} is stored on a drive, with room for one state only, but a step with donate=False needs room "
                "for the old state and the new one. Leave out donate=False, or store the state in memory."
            )
    taken: set[Node] = set()
    for k, value in enumerate(outputs):
        if is_given(root[value]) or is_lent(root[value]) or root[value] in taken:
            with gm.graph.inserting_before(program.output):
                outputs[k] = copy_of(value)
        elif k < program.num_new:
            taken.add(root[value])
    program.output.args = (outputs,)
    clean(gm)


def _tiers(program: Program) -> list[str | None]:
    """Return the tier of each of the state's tensors."""
    out: list[str | None] = []
    for cut in program.state.nodes:
        if isinstance(cut, ShardedInput):
            out += [tier for storage in cut.storages for *_, tier in storage.parts(0)]
        else:
            out += [None] if cut is None else []
    return out
