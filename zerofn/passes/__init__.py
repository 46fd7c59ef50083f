"""The passes: transformations of a captured step, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.program import Program
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


def __dir__() -> list[str]:
    return list(__all__)


def standard(donating: bool = True) -> list[Pass]:
    """Return all passes in order. `donating`: whether the new state is written into the memory of the old one, as in
    every training step without `compile(donate=False)`.

    The decisions about memory are made before `tile_logits`, the first that carries them out.

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
    """Return a function for `compile(passes=)`: all passes, with `mine` in front of the standard one of this name.

    Where a step does without that one (an evaluation does not donate), they stand where it would. `before("donate")`
    is the place for what changes values: the graph is scheduled, and still returns every new value of the state.
    Raises `ValueError` for another name.

    >>> edit = before("donate", Pass(lambda program: None, name="mine"))
    >>> [x.name for x in edit(standard())][21:23]
    ['write_after_checks', 'mine']
    """
    return _placed(name, mine, 0)


def after(name: str, *mine: Pass) -> Edit:
    """Return a function for `compile(passes=)`: all passes, with `mine` behind the standard one of this name. See
    `before`.
    """
    return _placed(name, mine, 1)


def _placed(name: str, mine: Sequence[Pass], behind: int) -> Edit:
    names = [x.name for x in _ALL]
    if name not in names:
        raise ValueError(f"passes: there is no standard pass {name!r}; there are {', '.join(names)}.")
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
