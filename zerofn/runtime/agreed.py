"""What ranks compare of a captured step, as text.

Where ranks have slices of leaves, their units may have sizes of their own. Then ranks with the same slices compare all
of it, and the others the transfers between them alone: no rank waits for another one in any other transfer.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from .. import tree
from ..comm.agreement import agree_among
from ..graph.fingerprint import between_slices, fingerprint
from ..graph.program import Program
from ..optim.base import GradientTransformation


def agreed_text(program: Program, numbers: list[str], machine: Any, deterministic: bool) -> str:
    """Return what must be the same on all ranks. `numbers`: see `state_arithmetic`. `machine`: for which it is
    scheduled, a dataclass or None.
    """
    slices = _slices(program)
    inputs = _inputs(program, shards=not slices)
    known: dict[str, Any] = {**inputs, **_optimizers(program), "machine": machine, "deterministic": deterministic}
    if machine is not None:  # whose repr is rounded
        known["machine in full"] = dataclasses.asdict(machine)
    transfers = between_slices(program) if slices else fingerprint(program)
    return "\n".join([*(f"{k}: {v}" for k, v in known.items()), *numbers, transfers])


def agree_among_slices(what: str, program: Program) -> None:
    """Raise `RuntimeError` on every rank unless ranks with the same slices have the same shards and transfers.

    Nothing is compared where all leaves are whole: `agreed_text` has these then.
    """
    slices = _slices(program)
    if slices:
        lines = [*(f"{k}: {v}" for k, v in _inputs(program, shards=True).items()), fingerprint(program)]
        agree_among(what, ", ".join(slices), "\n".join(lines))


def _slices(program: Program) -> list[str]:
    """Return which slices this rank has, along each axis."""
    return [] if program.mesh is None else [f"{axis.name} {axis.rank}" for axis in program.mesh.slices]


def _inputs(program: Program, *, shards: bool) -> dict[str, str]:
    """Return the shapes and dtypes of the state, with or without its shards, and of the batch.

    A number in the batch may differ from rank to rank, unless it meets the state: `numbers` has it then.
    """
    cut = {
        f"state.{name}"
        for name, (spec, _) in zip(program.state.names, program.owners, strict=False)
        if spec is not None
    }
    baked = {f"batch.{name}" for name in program.batch.baked}
    return {k: v for k, v in program.describe().items() if k not in baked and (shards or k not in cut)}


def _optimizers(program: Program) -> dict[str, str]:
    """Return the state's optimizers with their arguments, without addresses."""
    found: dict[str, str] = {}

    def look(x: Any) -> bool:
        for field in dataclasses.fields(x) if dataclasses.is_dataclass(x) else ():
            value = getattr(x, field.name)
            if isinstance(value, GradientTransformation):
                name = f"{type(x).__name__}.{field.name}" + (f" {len(found) + 1}" if found else "")
                found[name] = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        return False

    treedef = program.state.treedef
    tree.leaves(tree.unflatten(treedef, range(treedef.num_leaves)), is_leaf=look)
    return found
