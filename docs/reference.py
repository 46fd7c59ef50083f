"""The reference: all public names, and the classes that functions return, grouped by what one wants to do.

`pages()` writes a page for each group and one that lists them all. A name that `GROUPS` forgets is an error.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

# title -> (module, its names) or (module, "" for all that no other group has); classes that are returned have their
# modules, too.
GROUPS: dict[str, list[tuple[str, str]]] = {
    "Train": [
        ("zerofn", "TrainState shard compile value_and_grad accumulate skeleton progress unshard gather scatter"),
        ("zerofn", "tree_map copy Sharded remat microbatched"),
        ("zerofn.compile", "CompiledStep"),
        ("zerofn.training.grad", "ValueAndGrad"),
        ("zerofn.notebook.progress", "Progress"),
    ],
    "Precision and memory": [("zerofn", "Precision Fp8 DynamicLossScale StaticLossScale NoLossScale Offload abstract")],
    "Plan and measure": [
        ("zerofn", "plan Machine this_machine peak_flops"),
        ("zerofn.planning.table", "Table"),
        ("zerofn.planning.plan_row", "Row Config Needs Estimate"),
        ("zerofn.planning.plan", "Plan Memory"),
        ("zerofn.planning.profile", "Profile"),
        ("zerofn.cost.simulator", "Timeline"),
    ],
    "Save, load and resume": [
        ("zerofn", "save load verify export Checkpoints load_safetensors load_state_dict saved_paths CheckpointError"),
        ("zerofn.checkpoint.background_saves", "Saving"),
        ("zerofn.runs.stopping", "Stopped"),
    ],
    "Checkpoints and configurations of other libraries": [
        ("zerofn", "from_deepspeed load_deepspeed load_dcp export_dcp"),
        ("zerofn.interop.deepspeed", "Setup"),
    ],
    "Ranks, meshes and what they send": [
        ("zerofn", "Mesh rank world_size run sampler even same Wire abort because"),
        ("zerofn.comm.mesh", "Axis"),
        ("zerofn.collectives", ""),
    ],
    "Replicas that train apart": [
        ("zerofn", "diloco"),
        ("zerofn.training.diloco", "Diloco DilocoState"),
        ("zerofn.planning.rounds", "CompiledRounds RoundPlan"),
    ],
    "Norms, random numbers and checks": [
        ("zerofn", "all_finite first_nonfinite global_norm leaf_norms vdot normal_like"),
        ("zerofn.random", ""),
    ],
    "Passes, backends and regions of your own": [
        ("zerofn", "Pass eager_region register_step_pre_hook CaptureError"),
        ("zerofn.passes", "after before standard Context PassError"),
        ("zerofn.runtime.backend", "Backend Runner"),
        ("zerofn.graph.program", "Program"),
    ],
    "Models over several ranks": [("zerofn.parallel", "")],
    "Pipeline schedules": [("zerofn.schedules", "")],
    "Mixture of experts": [("zerofn.moe", "")],
    "Sparse attention": [("zerofn.sparse", ""), ("zerofn.sparse.deepspeed", "")],
    "Optimizers": [
        ("zerofn.optim", "adamw adam sgd lion lamb muon adafactor adagrad nadamw radam rmsprop"),
        ("zerofn.optim", "onebit_adam onebit_lamb zero_one_adam lookahead"),
        ("zerofn.optim", "chain masked multi_transform inject_hyperparams apply_updates from_functions"),
        ("zerofn.optim", "GradientTransformation"),
    ],
    "Learning-rate schedules": [
        ("zerofn.optim", "constant_schedule cosine_decay_schedule cosine_onecycle_schedule exponential_decay"),
        ("zerofn.optim", "join_schedules linear_schedule piecewise_constant_schedule polynomial_schedule"),
        ("zerofn.optim", "sgdr_schedule warmup_constant_schedule warmup_cosine_decay_schedule warmup_decay_lr"),
        ("zerofn.optim", "warmup_exponential_decay_schedule warmup_lr Schedule"),
    ],
    "Gradient clipping and other parts of optimizers": [("zerofn.optim", "")],
}
MODULES = "collectives moe optim parallel passes random schedules sparse".split()
# Methods that only ZeroFn itself calls.
HIDDEN = {
    "CompiledStep": "called|going_on",
    "Machine": "check_here|check_ranks|fake|known",
    "Sharded": "expect_copies|forget_copies|move|under",
    "Timeline": "clear|computing|done|message|roots_of|run|set_done|step|transfer",
    "ValueAndGrad": "with_errors|with_microbatches",
}


def names() -> dict[str, list[tuple[str, str]]]:
    """Return the (module, name) pairs of each group. Raises `ValueError` for a public name that has no group."""
    taken = {(module, name) for rows in GROUPS.values() for module, listed in rows for name in listed.split()}
    found: dict[str, list[tuple[str, str]]] = {}
    for title, rows in GROUPS.items():
        found[title] = []
        for module, listed in rows:
            every = listed.split() or [x for x in _public(module) if (module, x) not in taken]
            found[title] += [(module, x) for x in every]
    there = {x for rows in found.values() for x in rows}
    public = [("zerofn", x) for x in _public("zerofn")]
    public += [(f"zerofn.{module}", x) for module in MODULES for x in _public(f"zerofn.{module}")]
    also = {("zerofn.passes", "Pass")}  # is zerofn.Pass
    missing = [".".join(x) for x in public if x not in there | also]
    if missing:
        raise ValueError(f"docs.reference: no group has {', '.join(missing)}. Add them to GROUPS.")
    return found


def _public(module: str) -> list[str]:
    """Return the public names of a module that are defined somewhere: classes and functions."""
    found = importlib.import_module(module)
    return [x for x in found.__all__ if hasattr(getattr(found, x), "__module__")]


def pages() -> dict[str, str]:
    """Return the text of each page by its name: `reference.md`, which lists all, and one for each group."""
    listed, found = ["# Reference\n\nAll public names, by what they are for.\n"], {}
    for title, rows in names().items():
        page = f"reference_{'_'.join(re.findall(r'[a-z]+', title.lower()))}.md"
        listed.append(f"## [{title}]({page})\n\n| name | what it does |\n|---|---|")
        parts = [f"# {title}\n"]
        for module, name in rows:
            value = getattr(importlib.import_module(module), name)
            where = f"{value.__module__ if value.__module__.startswith('zerofn') else module}.{name}"
            shown = f"{module}.{name}" if module.removeprefix("zerofn.") in ("zerofn", *MODULES) else name
            listed.append(f"| [`{shown}`]({page}#{where}) | {_first_sentence(value)} |")
            parts.append(f"::: {where}\n{_options(name, value)}")
        listed.append("")
        found[page] = "\n".join(parts)
    return {"reference.md": "\n".join(listed), **found}


def _options(name: str, value: Any) -> str:
    """Return the options with which a class shows its methods: the public ones, and what makes it a function."""
    if not isinstance(value, type):
        return ""
    hidden = f', "!^({HIDDEN[name]})$"' if name in HIDDEN else ""
    rows = ("members: null", "inherited_members: true", f'filters: ["!^_(?!_call__|_iter__)"{hidden}]')
    return "    options:\n" + "".join(f"      {row}\n" for row in rows)


def _first_sentence(value: Any) -> str:
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("|", "\\|")
    return re.split(r"(?<=\.) (?=[A-Z`])", text, maxsplit=1)[0]
