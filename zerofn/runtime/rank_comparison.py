"""What ranks compare of a captured step, as text.

Where ranks have slices of leaves, their units may have sizes of their own. Then ranks with the same slices compare all
of it, and the others the transfers between them alone: no rank waits for another one in any other transfer.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from .. import tree
from ..capture.between_ranks import ADVICE, BEHIND_LOSS, NumberedStep
from ..capture.capture import CaptureError
from ..collectives import all_gather
from ..comm.channel_groups import Channel
from ..comm.channels import channel_of
from ..comm.mesh import Axis, Mesh
from ..graph.fingerprint import between_slices, between_stages, fingerprint
from ..graph.messages import message_ends
from ..graph.nested import calls
from ..graph.program import Program
from ..graph.same_graph import without_addresses
from ..guards.torch_settings import settings_of_all
from ..job.agreement import agree_among, exchange, exchange_on, rank_and_size
from ..job.agreement import fingerprint as _short
from ..job.step_order import meetings
from ..optim.base import GradientTransformation
from ..sharding.replicated_values import Held, digests, first_unequal
from .options import Options

_VALUES, _ROWS = "values", "rows"
_RANKS_TOLD = 4  # whose sentences an error has, at most


def only_sums(mesh: Mesh | None) -> bool:
    """Whether ranks have rows of their own and nothing else, so that sizes of their batches may differ."""
    return mesh is None or all(axis.size == 1 or axis.kind.only_rows for axis in mesh.axes)


def agreed_inputs(program: Program, options: Options) -> str:
    """Return what must be the same on all ranks of a step that is not scheduled yet."""
    inputs = _inputs(program, shards=not _slices(program))
    known: dict[str, Any] = {**inputs, **_optimizers(program), **options.agreed(), **settings_of_all()}
    if _has_stages(program):
        known["microbatches"] = ", ".join(str(call.rounds) for _, call in calls(program.gm))
    return "\n".join(f"{k}: {v}" for k, v in known.items())


def agreed_text(program: Program, inputs: str) -> str:
    """Return what must be the same on all ranks of a scheduled step. `inputs`: see `agreed_inputs`."""
    if _has_stages(program):
        return "\n".join([inputs, between_stages(program)])
    return "\n".join([inputs, between_slices(program) if _slices(program) else fingerprint(program)])


def _has_stages(program: Program) -> bool:
    return program.mesh is not None and program.mesh.stages.size > 1


def refuse_differences(what: str, step: NumberedStep, mesh: Mesh | None, again: Callable[[], NumberedStep]) -> bool:
    """Raise `CaptureError` on every rank if values that ranks compute in different ways would make them go apart.
    Return whether their batches have other sizes or numbers.

    `again`: the same step, captured with the user's lines. All ranks must call it.
    """
    told = {_VALUES: step.told(), _ROWS: step.of_rows()}
    lengths = {kind: {axis: (len(x), _short(str(sorted(x)))) for axis, x in of.items()} for kind, of in told.items()}
    note = {
        "told": lengths,
        "expects": step.expects,
        "given": _short(repr(step.given)),
        "held": digests(step.held, mesh),
    }
    notes = exchange(what, json.dumps(note))
    known = [json.loads(note) for note in notes]
    if mesh is None or (len(set(notes)) == 1 and not step.expects):
        return False
    _refuse_other_values(what, step.held, [x["held"] for x in known])
    common: dict[str, dict[str, set[int]]] = {_VALUES: {}, _ROWS: {}}
    for kind, axis, numbers in ((kind, axis, x) for kind, of in told.items() for axis, x in of.items()):
        ranks = [known[rank] for rank in mesh.along(axis)]
        if kind == _ROWS and any(x["given"] != ranks[0]["given"] for x in ranks):
            continue  # a graph does not tell which of its numbers are those, or sizes, of the batch
        theirs = [x["told"][kind][axis] for x in ranks]
        if any(x != theirs[0] for x in theirs):
            rows = _of_all(sorted(numbers), max(length for length, _ in theirs), mesh.axis(axis), what)
            common[kind][axis] = set.intersection(*map(set, rows))

    def sentence() -> str:
        found = step.difference(common[_VALUES], common[_ROWS])
        return found and (again().difference(common[_VALUES], common[_ROWS]) or found)

    sentences = exchange_on(what, sentence)
    told_ranks = [(rank, x) for rank, x in enumerate(sentences) if x]
    before_loss = [(rank, x) for rank, x in told_ranks if not x.startswith(BEHIND_LOSS)]
    found = [f"  rank {rank}: {x}" for rank, x in before_loss or told_ranks]
    if found:
        raise CaptureError("\n".join([f"{what}: ranks differ.", *found[:_RANKS_TOLD], ADVICE]))
    return len({x["given"] for x in known}) > 1


def _refuse_other_values(what: str, held: Sequence[Held], told: Sequence[Mapping[str, str]]) -> None:
    """Raise `RuntimeError` on every rank if some hold other values of what they should hold alike."""
    found = first_unequal(what, held, told)
    if found is not None:
        more = f" (and of {len(found.leaves) - 1} more leaves)" if len(found.leaves) > 1 else ""
        name, one, other = found.leaves[0]
        raise RuntimeError(
            f"{what}: ranks have different values of {name!r}{more}, which must be the same on all ranks that hold "
            "it.\n"
            f"  rank {found.one}: {one}\n"
            f"  rank {found.other}: {other}\n"
            "Change a sharded state in the same way on every rank, or make the change before zerofn.shard. Put values "
            "that belong to one rank into its batch."
        )


def _of_all(numbers: list[int], length: int, axis: Axis, what: str) -> list[list[int]]:
    """Return the numbers of every rank of the axis, each with -1 up to a length."""
    mine = torch.tensor([[*numbers, *[-1] * (length - len(numbers))]])
    with meetings().lasting([axis.group], f"what {what} computes", b""):
        return all_gather(mine, axis).tolist()


def agree_among_slices(what: str, program: Program) -> None:
    """Raise `RuntimeError` on every rank unless ranks with the same slices have the same shards and transfers, and
    stages of a pipeline receive what others send them.

    Nothing is compared where all leaves are whole: `agreed_text` has these then.
    """
    slices = _slices(program)
    if slices:
        lines = [*(f"{k}: {v}" for k, v in _inputs(program, shards=True).items()), fingerprint(program)]
        agree_among(what, ", ".join(slices), "\n".join(lines))
        _agree_on_messages(what, program)


def _agree_on_messages(what: str, program: Program) -> None:
    """Raise `RuntimeError` on every rank unless each rank receives what another sends it, in that order."""
    if program.mesh is None or program.mesh.stages.size == 1 or rank_and_size()[1] == 1:
        return
    mine: dict[Channel, list[str]] = defaultdict(list)
    for end in message_ends(program.gm.graph):
        text = f"{end.edge!r} {list(end.value.shape)} {end.value.dtype}"
        mine[channel_of(end.group, end.peer, sends=end.sends)].append(text)
    short = json.dumps([[*channel, _short("\n".join(lines))] for channel, lines in mine.items()])
    ends: dict[Channel, dict[int, str]] = defaultdict(dict)
    told = exchange(what, short)
    for rank, text in enumerate(told if len(told) > 1 else ()):  # of a fake group, there is one
        for source, target, found in json.loads(text):
            ends[source, target][rank] = found
    apart = [channel for channel, found in ends.items() if len({found.get(r) for r in channel}) > 1]
    if apart:
        source, target = min(apart)
        lines = [json.loads(x) for x in exchange(f"{what}, in full", json.dumps(mine.get((source, target), [])))]
        sent, received = (lines[r] for r in (source, target))
        a, b = next((a, b) for a, b in zip_longest(sent, received, fillvalue="nothing") if a != b)
        raise RuntimeError(
            f"{what}: stages of the pipeline differ. Rank {source} sends {len(sent)} messages to rank {target}, which "
            f"receives {len(received)}; the first that differs is {a} at the sender and {b} at the receiver. Every "
            "rank needs the same cuts, schedule, passes and number of microbatches."
        )


def _slices(program: Program) -> list[str]:
    """Return which slices this rank has, along each axis."""
    return [] if program.mesh is None else [f"{axis.name} {axis.rank}" for axis in program.mesh.slices]


def _inputs(program: Program, *, shards: bool) -> dict[str, str]:
    """Return the shapes and dtypes of the state, with or without its shards, and of the batch.

    A number in the batch may differ from rank to rank, unless it meets the state: see `refuse_differences`. So may
    sizes, where ranks only sum gradients, as along `data`.
    """
    cut = {
        f"state.{name}"
        for name, (spec, _) in zip(program.state.names, program.owners, strict=False)
        if spec is not None
    }
    baked = {f"batch.{name}" for name in program.batch.baked}
    found = {k: v for k, v in program.describe().items() if k not in baked and (shards or k not in cut)}
    if not only_sums(program.mesh):
        return found
    return {k: re.sub(r"\d+(?=[^\[\]]*\])", "*", v) if k.startswith("batch") else v for k, v in found.items()}


def _optimizers(program: Program) -> dict[str, str]:
    """Return the state's optimizers with their arguments, without addresses."""
    found: dict[str, str] = {}

    def look(x: Any) -> bool:
        for field in dataclasses.fields(x) if dataclasses.is_dataclass(x) else ():
            value = getattr(x, field.name)
            if isinstance(value, GradientTransformation):
                name = f"{type(x).__name__}.{field.name}" + (f" {len(found) + 1}" if found else "")
                found[name] = without_addresses(repr(value))
        return False

    treedef = program.state.treedef
    tree.leaves(tree.unflatten(treedef, range(treedef.num_leaves)), is_leaf=look)
    return found
