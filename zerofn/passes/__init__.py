"""The passes: transformations of a captured step, in the order in which they run."""

from __future__ import annotations

from ..graph.program import Program
from ._checked import PassError
from ._pass import Edit, Pass, edited
from ._pipeline import Pipeline
from .assign_buffers import assign_buffers
from .canonicalize import canonicalize
from .copy_outputs import copy_outputs
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
from .sink_gathers import sink_gathers
from .split_state_reads import split_state_reads
from .start_param_gather import start_param_gather
from .sync_replicated_state import sync_replicated_state
from .update_on_host import update_on_host
from .wait_param_gather import wait_param_gather
from .write_after_checks import write_after_checks

__all__ = ["Edit", "Pass", "PassError", "Pipeline", "pipeline", "run", "standard"]

# Results are wrong, and not only slow, if one of these is left out or moved.
REQUIRED = (
    functionalize,
    sync_replicated_state,
    write_after_checks,
    donate,
    start_param_gather,
    copy_outputs,
    wait_param_gather,
    schedule_state_reads,
)


def standard(donating: bool) -> list[Pass]:
    """Return all passes in order. The search for a memory budget makes its decisions before `recompute_activations`."""
    return [
        # bring what the user wrote into the form that the other passes expect
        Pass(fold_split_master, "body"),
        Pass(canonicalize, "body"),
        Pass(functionalize, "body"),
        Pass(split_state_reads, "body"),
        Pass(sink_gathers, "body"),
        # decide what is saved for the backward pass, and when transfers start
        Pass(hoist_gathers),
        Pass(recompute_activations, "body"),
        Pass(offload_activations, "body"),
        Pass(reshard, "body"),
        Pass(hide_sums, "body"),
        Pass(raise_reduce_scatters, "body"),
        Pass(raise_unscale, "body"),
        Pass(gradients_as_bucket_views, "body"),
        Pass(prefetch, "body"),
        Pass(read_local_shards, "body"),
        Pass(fuse_norms, "body"),
        Pass(reinplace, "body"),
        # write the new state
        Pass(sync_replicated_state),
        *(
            [
                Pass(write_after_checks),
                Pass(donate),
                Pass(raise_updates),
                Pass(update_on_host),
                Pass(offload_gradients),
                Pass(start_param_gather),
            ]
            if donating
            else [Pass(copy_outputs)]
        ),
        # place waits and buffers
        Pass(wait_param_gather),
        Pass(schedule_state_reads),
        Pass(assign_buffers),
    ]


def pipeline(donating: bool, edit: Edit | None = None) -> Pipeline:
    """Return the passes of a step. `edit` takes the standard list and returns the list to run; see
    `zerofn.compile(passes=)`.
    """
    ours = standard(donating)
    return Pipeline(ours if edit is None else edited(ours, edit, REQUIRED), [each.fn for each in ours])


def run(program: Program, *, donating: bool) -> Program:
    """Apply all passes to a captured program and return it."""
    pipeline(donating).run(program)
    return program
