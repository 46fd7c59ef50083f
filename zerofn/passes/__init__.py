"""The passes: transformations of a captured step, in the order in which they run.

`zerofn.compile(passes=)` takes passes of your own: a list, which runs before `donate`, or a function from the list of
passes to the list to run. `before` and `after` make one by the name of a standard pass.

Words:

- *Pass*: a function `fn(program) -> None` of the step; with the scope "body", of the step and of the body of each loop.
  A function of two arguments also gets a *Context*. A pass says whether it is required, carries out decisions about
  memory, and takes part in the search (`_pass.py`).
- *Context*: the machine, the mesh and the decisions about memory (`_context.py`).
- *finite check*: whether all gradients are finite; a step that fails it keeps parameters and moments.
- *bucket*: the flat buffer of a unit's gradient, from which it is sent.
- *cache*: the gathered copies of units at stages 1 and 2, or of parts of units with hpZ.

How a step is scheduled (`_pipeline.py`): the first passes bring the graph into one form. Then, if memory is limited
or a loop could gather units once, `zerofn.passes.budget` decides what is dropped and brought back. The passes from
`tile_logits` on carry that out, start transfers early, write the new state, and place waits and buffers.
`ZEROFN_DUMP=dir` writes the graph after each pass, as Python.

    fold_split_master          uses the upper half of a split master, which is in memory, as its bfloat16 rounding
    canonicalize               removes detaches, views without effect and transfers of units of which this rank has
                               nothing, and merges repeated gathers; merges no computation, since a model may
                               recompute on purpose
    functionalize              turns writes to the step's own memory into new values if nothing else reads that
                               memory, because new values can be recomputed
    share_masks                merges equal values that only make masks of attention, so all layers save one mask
    split_state_reads          reads state on a drive once to compute with it, and once to update it
    sink_gathers               moves gathers, with their casts and views, down to their first use
    sync_replicated_state      averages over ranks the replicated state that depends on a rank's own batch, such as
                               batch-norm statistics, or takes rank 0's
    tile_logits                gives the chosen heads and their cross entropies one tile of logits at a time, forward
                               and backward
    hoist_gathers              at stage 3, gathers a unit once before a loop over microbatches, for as many units as
                               memory allows
    recompute_activations      recomputes the chosen activations at their first use in the backward pass, and gathers
                               again what the step does not save
    cut_stages                 along `pipe`, replaces a loop over microbatches by this rank's part of a pipeline: calls
                               of pieces of its stages, sends, receives and waits, in the order of a schedule; sums
                               over microbatches keep their order, and with `accumulate(reduce="round")` the sums of a
                               round are reduced after its last gradient
    offload_activations        sends the chosen activations to host memory, and copies each back just in time, by
                               simulated times
    reshard                    drops a gathered unit between two uses if three or more other units are used in between,
                               and gathers it again
    hide_sums                  puts products of weights' gradients between the start and the wait of a sum, exchange or
                               gather of values; starts a repeated gather as soon as the transfer before it is over
    raise_reduce_scatters      starts a reduce-scatter when its last gradient exists, and its continuation across
                               replicas when the first transfer is over; at most two of a kind are in flight
    raise_unscale              unscales a gradient as soon as it is reduced, so that it can leave memory
    gradients_as_bucket_views  computes a gradient in its bucket if its operation can write to existing memory; a piece
                               of a pipeline adds its gradients there, leaf by leaf
    prefetch                   starts gathers, and the drive reads behind them, when a simulated run has the link free
                               and the units in memory are at most three consecutive ones, or within the budget
    read_local_shards          reads a leaf that is wholly in this rank's shard from there; a gather then copies only
                               the leaves that cross the shard's edges
    fuse_norms                 takes a gradient's norm and finite check in one read, as soon as it is complete
    reinplace                  lets an elementwise operation overwrite an operand that it is the last to read
    write_after_checks         moves updates below every check that ranks agree on a value
    donate                     makes update rules write in place, and copies other new values at the end
    raise_updates              runs an update as soon as its gradient is reduced and the old value was last read;
                               updates that wait for the finite check or the norm run in order of first use
    update_on_host             updates state in host memory on the host, or streams it through the device, by measured
                               rates
    offload_gradients          writes gradients that wait for the finite check to the drives of their state, and
                               computes them in the buffer that drives write from
    start_param_gather         stages 1 and 2, and hpZ: starts the all-gather of updated shards into the cache, unit by
                               unit
    copy_outputs               without donation, in place of the six passes above: copies results that share memory
                               with the state
    wait_param_gather          stages 1 and 2, and hpZ: waits for a unit of the cache at its first use, in the next step
    schedule_state_reads       reads one update's state while the previous update runs, and the first two while
                               gradients are computed, into one buffer
    assign_buffers             gives gathered units and buckets places in static buffers; the largest, or all buckets,
                               stay out if the peak would rise by more than a sixteenth, or above the budget

Invariants:

- A pass changes no bit of a result. It moves, copies and replaces nodes locally, and sorts nothing again.
- A pass allocates nothing. It appends requests for buffers and drive space to the `Program`, and nodes refer to them
  by index; `zerofn/runtime/buffers.py` allocates before the first run. So the search can try schedules and drop them,
  and a planned schedule is the one that will run.
- After each pass of a user the graph is checked (`_checked.py`): it is sound, has the same inputs and results, writes
  only to its own memory, waits for the transfers that it reads, and reads no memory that was overwritten or assigned
  to another value. Before donation and scheduling it must also be pure. Ranks compare their transfers afterwards, as
  always.
- A backend with a method `passes(ours)` changes the list before the user does. `backend="inductor"` adds
  `outline_regions` (`zerofn.lowering`).

Static buffers: short-lived values that move (gathered units, buckets, reads from drives) are packed by the spans in
which they are needed (`_packing.py`), in arenas that all steps of the process share. `plan.memory()` reports what is
reserved and how much of it is in use. Values that live until the update, or leave the step, have memory of their own.

Tiles of logits: see `zerofn.ops`. A region of a compiler rounds a loss differently from tiles, and is faster than the
same operations one by one, so a backend that makes regions takes `tile_logits` out of the list.

Start reading: `_pipeline.py`, then `sink_gathers.py` and `prefetch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..graph.program import Program
from ..util.names import of_package
from ._checked import PassError
from ._context import Context
from ._pass import Edit, Pass, edited
from ._pipeline import Pipeline
from .assign_buffers import assign_buffers
from .canonicalize import canonicalize
from .copy_outputs import copy_outputs
from .cut_stages import cut_stages
from .donate import donate
from .fold_split_master import fold_split_master
from .functionalize import functionalize
from .fuse_norms import fuse_norms
from .gradients_as_bucket_views import gradients_as_bucket_views
from .hide_sums import hide_sums
from .hoist_gathers import hoist_gathers
from .offload_activations import offload_activations
from .offload_gradients import offload_gradients
from .prefetch import prefetch
from .raise_reduce_scatters import raise_reduce_scatters
from .raise_unscale import raise_unscale
from .raise_updates import raise_updates
from .read_local_shards import read_local_shards
from .recompute_activations import recompute_activations
from .reinplace import reinplace
from .reshard import reshard
from .schedule_state_reads import schedule_state_reads
from .share_masks import share_masks
from .sink_gathers import sink_gathers
from .split_state_reads import split_state_reads
from .start_param_gather import start_param_gather
from .sync_replicated_state import sync_replicated_state
from .tile_logits import tile_logits
from .update_on_host import update_on_host
from .wait_param_gather import wait_param_gather
from .write_after_checks import write_after_checks

__all__ = ["Context", "Pass", "PassError", "after", "before", "standard"]


if not TYPE_CHECKING:
    __getattr__, __dir__ = of_package(__name__, __all__)


def standard(donating: bool = True) -> list[Pass]:
    """Return all passes in order. `donating`: whether the new state is written into the memory of the old one, as in
    every training step without `compile(donate=False)`.

    The decisions about memory are made before `tile_logits`, the first pass that carries them out.

    >>> [x.name for x in standard()][:3]
    ['fold_split_master', 'canonicalize', 'functionalize']
    """
    return [x for x in _ALL if x.fn not in (_WITHOUT_DONATION if donating else _DONATING)]


_ALL = [
    # bring what the user wrote into the form that the other passes expect
    Pass(fold_split_master, "body"),
    Pass(canonicalize, "body"),
    Pass(functionalize, "body", required=True),
    Pass(share_masks, "body"),
    Pass(split_state_reads, "body"),
    Pass(sink_gathers, "body"),
    Pass(sync_replicated_state, required=True),
    # decide what is saved for the backward pass, and when transfers start
    Pass(tile_logits, "body", carries_out=True),
    Pass(hoist_gathers, carries_out=True),
    Pass(recompute_activations, "body", carries_out=True),
    Pass(cut_stages, carries_out=True),
    Pass(offload_activations, "body", carries_out=True),
    Pass(reshard, "body", carries_out=True),
    Pass(hide_sums, "body"),
    Pass(raise_reduce_scatters, "body"),
    Pass(raise_unscale, "body"),
    Pass(gradients_as_bucket_views, "body"),
    Pass(prefetch, "body", carries_out=True),
    Pass(read_local_shards, "body", searched=False),  # its result differs by rank
    Pass(fuse_norms, "body"),
    Pass(reinplace, "body"),
    # write the new state
    Pass(write_after_checks, required=True),
    Pass(donate, required=True),
    Pass(raise_updates),
    Pass(update_on_host),
    Pass(offload_gradients),
    Pass(start_param_gather, required=True),
    Pass(copy_outputs, required=True),
    # place waits and buffers
    Pass(wait_param_gather, required=True),
    Pass(schedule_state_reads, required=True),
    Pass(assign_buffers, searched=False),  # in the room that the search leaves for it
]
_DONATING = (write_after_checks, donate, raise_updates, update_on_host, offload_gradients, start_param_gather)
_WITHOUT_DONATION = (copy_outputs,)


def before(name: str, *mine: Pass) -> Edit:
    """Return a function for `compile(passes=)`: all passes, with `mine` before the standard pass of this name.

    If a step does not run that pass (an evaluation does not donate), `mine` runs where it would. Use `before("donate")`
    for passes that change values: there the graph is scheduled, and still returns every new value of the state.
    Raises `ValueError` for an unknown name.

    >>> edit = before("donate", Pass(lambda program: None, name="mine"))
    >>> [x.name for x in edit(standard())][21:23]
    ['write_after_checks', 'mine']
    """
    return _placed(name, mine, 0)


def after(name: str, *mine: Pass) -> Edit:
    """Return a function for `compile(passes=)`: all passes, with `mine` after the standard pass of this name. See
    `before`.

    >>> edit = after("donate", Pass(lambda program: None, name="mine"))
    >>> names = [x.name for x in edit(standard())]
    >>> names.index("mine") - names.index("donate")
    1
    """
    return _placed(name, mine, 1)


def _placed(name: str, mine: Sequence[Pass], behind: int) -> Edit:
    names = [x.name for x in _ALL]
    if name not in names:
        raise ValueError(f"passes: there is no standard pass {name!r}. The standard passes are {', '.join(names)}.")
    earlier = _ALL[: names.index(name) + behind]

    def edit(known: list[Pass]) -> list[Pass]:
        at = 1 + max((k for k, x in enumerate(known) if x in earlier), default=-1)
        return [*known[:at], *mine, *known[at:]]

    return edit


def pipeline(donating: bool, edits: Sequence[Edit | Sequence[Pass]] = ()) -> Pipeline:
    """Return the passes of a step. `edits`: each takes the list, the first one the standard list, and returns the list
    to run, or is a list of passes to run before `donate`; see `zerofn.compile(passes=)`.
    """
    found = standard(donating)
    for edit in edits:
        found = edited(found, edit if callable(edit) else before("donate", *edit))
    return Pipeline(found)


def run(program: Program, *, donating: bool) -> Program:
    """Apply all passes to a captured program and return it."""
    pipeline(donating).run(program)
    return program
