"""Every file of the library, and every pass, has a test where its name says."""

import ast
import importlib

import pytest

from tests.support.library import FILES, LIBRARY, ROOT, parse

# Library file -> the tests that hold it, where no test mirrors its name.
TESTED_BY = {
    "_torch_compat": "test_house.py",
    "checkpoint.checksums": "checkpoint/test_exporting.py",
    "checkpoint.named_leaves": "checkpoint/test_save_load.py",
    "checkpoint.fill_shards": "checkpoint/test_save_load.py",
    "checkpoint.folder": "checkpoint/test_interrupted_saves.py",
    "checkpoint.loading": "checkpoint/test_save_load.py",
    "checkpoint.manifest": "checkpoint/test_bad_checkpoints.py",
    "checkpoint.tensor_source": "checkpoint/test_mesh.py",
    "checkpoint.saving": "checkpoint/test_interrupted_saves.py",
    "checkpoint.file_sources": "checkpoint/test_tensor_file.py",
    "runs.stopping": "runs/test_signals.py",
    "checkpoint.save_plan": "checkpoint/test_mesh.py",
    "collectives.expected": "capture/test_unsummed.py",
    "collectives.maps": "test_collectives.py",
    "comm.groups": "comm/test_mesh.py",
    "job.in_flight": "comm/test_transport.py",
    "cost.calibrate": "test_cli.py",
    "cost.host_share": "offload/test_policy.py",
    "cost.machine": "planning/test_planner.py",
    "deferred_init.call_log": "deferred_init/test_record.py",
    "deferred_init.effects": "deferred_init/test_record.py",
    "deferred_init.materialize": "deferred_init/test_record.py",
    "deferred_init.rng_marks": "deferred_init/test_record.py",
    "dry_run.fake_machine": "planning/test_planner.py",
    "dry_run.script": "test_cli.py",
    "graph.buffers": "runtime/test_buffers.py",
    "capture.checked_capture": "planning/test_planner.py",
    "graph.edit": "capture/test_loop.py",
    "graph.fingerprint": "capture/test_verify.py",
    "graph.names": "capture/test_verify.py",
    "graph.node_kinds": "capture/test_loop.py",
    "graph.phase": "passes/test_offload_activations.py",
    "graph.program": "capture/test_capture.py",
    "graph.resident": "graph/test_liveness.py",
    "graph.source_lines": "capture/test_advice.py",
    "guards.table": "guards/test_walk.py",
    "guards.tensors": "guards/test_walk.py",
    "guards.tokens": "guards/test_walk.py",
    "guards.torch_settings": "guards/test_walk.py",
    "integrations.asked_numbers": "integrations/test_effects.py",
    "integrations.conditional_expressions": "integrations/test_effects.py",
    "integrations.deferred_values": "integrations/test_effects.py",
    "integrations.recorders": "integrations/test_effects.py",
    "integrations.recording": "integrations/test_effects.py",
    "integrations.carried_state": "integrations/test_lightning_changes.py",
    "integrations.changing_hyperparameters": "integrations/test_lightning_changes.py",
    "integrations.param_groups": "integrations/test_lightning_changes.py",
    "integrations.lightning.checks": "integrations/test_lightning_hooks.py",
    "integrations.lightning.checkpoints": "integrations/test_lightning_models.py",
    "integrations.lightning.configured": "integrations/test_lightning.py",
    "integrations.lightning.evaluation": "integrations/test_evaluations.py",
    "integrations.lightning.optimizers": "integrations/test_lightning.py",
    "integrations.lightning.ranks": "integrations/test_lightning.py",
    "integrations.lightning.steps": "integrations/test_lightning.py",
    "integrations.lightning.strategy": "integrations/test_lightning.py",
    "integrations.lightning.watched_module": "integrations/test_lightning.py",
    "integrations.transformers.adapters": "integrations/test_adapters.py",
    "integrations.transformers.gathering": "integrations/test_trl.py",
    "integrations.transformers.padding": "integrations/test_padding.py",
    "integrations.transformers.per_token": "integrations/test_padding.py",
    "integrations.modules": "integrations/test_transformers.py",
    "integrations.transformers.arguments": "integrations/test_transformers.py",
    "integrations.transformers.evaluation": "integrations/test_transformers_evaluation.py",
    "integrations.transformers.meshes": "integrations/test_transformers_mesh.py",
    "integrations.transformers.names": "integrations/test_names.py",
    "integrations.transformers.modules": "integrations/test_transformers.py",
    "integrations.transformers.optimizers": "integrations/test_transformers_optimizers.py",
    "integrations.transformers.seq2seq": "integrations/test_transformers.py",
    "integrations.transformers.steps": "integrations/test_transformers_optimizers.py",
    "integrations.transformers.trainer": "integrations/test_transformers.py",
    "interop.adam": "interop/test_deepspeed_checkpoint.py",
    "interop.dcp_files": "interop/test_dcp.py",
    "launch.agent": "launch/test_script.py",
    "launch.node": "launch/test_nodes.py",
    "launch.worker": "launch/test_run.py",
    "memory.arena": "passes/test_assign_buffers.py",
    "memory.donation": "compile/test_donation.py",
    "notebook.cells": "notebook/test_ranks.py",
    "notebook.engine": "notebook/test_ranks.py",
    "notebook.magics": "notebook/test_ranks.py",
    "notebook.pool": "notebook/test_ranks.py",
    "notebook.sinks": "notebook/test_progress.py",
    "offload.copy_engine": "offload/test_host_tensor.py",
    "offload.disk.checksum": "offload/disk/test_store.py",
    "offload.disk.engine": "offload/disk/test_failing_drives.py",
    "offload.disk.files": "offload/disk/test_failing_drives.py",
    "offload.disk.region": "offload/disk/test_store.py",
    "offload.disk.transfer": "offload/disk/test_store.py",
    "offload.host_worker": "offload/test_host_tensor.py",
    "ops.adamw": "optim/test_rules.py",
    "ops.kernel_args": "ops/test_cpu.py",
    "ops.lion": "optim/test_rules.py",
    "ops.part_reductions": "sharded_math/test_reductions.py",
    "ops.ravel": "geometry/test_layout.py",
    "ops.reference": "ops/test_formats.py",
    "ops.runs": "ops/test_cpu.py",
    "ops.sgd": "optim/test_rules.py",
    "optim.adafactor": "optim/test_transformations.py",
    "optim.adagrad": "optim/test_transformations.py",
    "optim.adamw": "optim/test_rules.py",
    "optim.adaptive_clip": "optim/test_transformations.py",
    "optim.base": "optim/test_transformations.py",
    "optim.block_rms": "optim/test_transformations.py",
    "optim.chain": "optim/test_transformations.py",
    "optim.checks": "optim/test_transformations.py",
    "optim.clip": "optim/test_transformations.py",
    "optim.cycles": "optim/test_schedules.py",
    "optim.decay": "optim/test_rules.py",
    "optim.ema": "optim/test_wrappers.py",
    "optim.factored_rms": "optim/test_whole_leaves.py",
    "optim.functions": "optim/test_wrappers.py",
    "optim.fused": "optim/test_rules.py",
    "optim.groups": "optim/test_masks.py",
    "optim.identity": "optim/test_transformations.py",
    "optim.inject": "optim/test_wrappers.py",
    "optim.lamb": "optim/test_rules.py",
    "optim.leaf_runs": "optim/test_masks.py",
    "optim.lion": "optim/test_rules.py",
    "optim.lookahead": "optim/test_transformations.py",
    "optim.masked": "optim/test_masks.py",
    "optim.multi_transform": "optim/test_masks.py",
    "optim.muon": "optim/test_whole_leaves.py",
    "optim.nadamw": "optim/test_transformations.py",
    "optim.params_ema": "optim/test_wrappers.py",
    "optim.radam": "optim/test_transformations.py",
    "optim.rms": "optim/test_transformations.py",
    "optim.rmsprop": "optim/test_transformations.py",
    "optim.scale": "optim/test_rules.py",
    "optim.scale_by_adam": "optim/test_rules.py",
    "optim.scale_by_muon": "optim/test_whole_leaves.py",
    "optim.select": "optim/test_transformations.py",
    "optim.sgd": "optim/test_rules.py",
    "optim.torch_optimizers": "optim/test_wrappers.py",
    "optim.trace": "optim/test_rules.py",
    "optim.trust_ratio": "optim/test_rules.py",
    "optim.warmup": "optim/test_schedules.py",
    "moe.router_logits": "moe/test_experts.py",
    "parallel.cut_experts": "parallel/test_sequence_parallel.py",
    "parallel.applied_once": "parallel/test_heads.py",
    "parallel.plan": "parallel/test_tensor_parallel.py",
    "passes._checked": "passes/test_pass.py",
    "passes._packing": "passes/test_assign_buffers.py",
    "passes._pass": "passes/test_pass.py",
    "passes._pipeline": "passes/test_passes.py",
    "passes.budget.decision": "passes/test_offload_activations.py",
    "passes.budget.eviction": "passes/budget/test_search.py",
    "passes.budget.shared": "compile/test_ragged_batches.py",
    "planning.picture": "planning/test_plan.py",
    "planning.plan_row": "planning/test_planner.py",
    "planning.plan_variants": "planning/test_planner.py",
    "planning.table": "planning/test_planner.py",
    "random.mode": "random/test_draws.py",
    "random.rng_state": "random/test_draws.py",
    "runtime.agreed_captures": "compile/test_ragged_batches.py",
    "runtime.guarded_captures": "guards/test_walk.py",
    "runtime.captured_step": "runtime/test_backend.py",
    "runtime.errors": "capture/test_advice.py",
    "runtime.inputs": "compile/test_signatures.py",
    "runtime.options": "test_wrong_arguments.py",
    "runtime.outputs": "compile/test_donation.py",
    "geometry.leaf_choices": "geometry/test_layout.py",
    "sharding.allocate": "offload/test_drive_tensor.py",
    "sharding.gather_scatter": "sharding/test_sharded.py",
    "sharding.partition": "sharding/test_spec.py",
    "sharding.state_tree": "sharding/test_shard.py",
    "sharded_math.whole_leaves": "optim/test_whole_leaves.py",
    "training.extra": "training/test_train_state.py",
    "training.checkpoint_params": "random/test_draws.py",
    "util.other_processes": "checkpoint/test_owner.py",
    "util.errors": "capture/test_advice.py",
    "util.patches": "random/test_draws.py",
    "util.process": "offload/test_host_tensor.py",
    "util.sizes": "passes/budget/test_search.py",
    "util.user_line": "capture/test_advice.py",
    "util.version": "test_api.py",
}


def mirror(module):
    """Where the test of a library's file is looked for: zerofn.passes.reshard in tests/passes/test_reshard.py, or
    in the folder tests/passes/reshard where one file would be too long."""
    *folder, name = module.split(".")[1:]
    return ROOT.joinpath("tests", *folder, f"test_{name}.py"), ROOT.joinpath("tests", *folder, name)


def has_mirror(module):
    file, folder = mirror(module)
    return file.exists() or any(folder.glob("test_*.py"))


def wrong_about(module):
    """What is wrong about where the test of a library's file is; "" where nothing is."""
    entry, file = TESTED_BY.get(module.removeprefix("zerofn.")), mirror(module)[0].relative_to(ROOT)
    if entry is None:
        return "" if has_mirror(module) else f"write {file}, or say in TESTED_BY which test holds {module}"
    if has_mirror(module):
        return f"take {module} from TESTED_BY: it has a test of its own"
    return "" if (ROOT / "tests" / entry).exists() else f"TESTED_BY names {entry}, which is not there"


def test_files_have_a_test():
    """Those of a package alone hold names of others, and what the package holds."""
    modules = [module for module, path in FILES.items() if path.name != "__init__.py"]
    assert list(filter(None, map(wrong_about, modules))) == []


def test_entries_of_files_without_a_mirror_name_files():
    assert {f"zerofn.{name}" for name in TESTED_BY} - set(FILES) == set()


# What the search over budgets shares with a pass, so that it chooses by the numbers by which the pass then acts.
SHARED_WITH_THE_SEARCH = {
    "hoist_gathers": {"hoistable"},
    "offload_activations": {"Stay", "stays"},
    "prefetch": {"UnitSource", "sources_in", "Bound", "Run", "early", "few_alive"},
    "reshard": {"uses_of_gathers", "num_others"},
}


def pass_files():
    folder = LIBRARY / "passes"
    return [p.stem for p in sorted(folder.glob("*.py")) if not p.stem.startswith("_")]


@pytest.mark.parametrize("name", pass_files())
def test_a_pass_is_one_function_of_its_files_name(name):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = {n.name for n in parse(f"zerofn.passes.{name}").body if isinstance(n, kinds) and n.name[0] != "_"}
    assert public == {name} | SHARED_WITH_THE_SEARCH.get(name, set())


@pytest.mark.parametrize("name", pass_files())
def test_a_pass_stands_in_the_list(name):
    assert getattr(importlib.import_module(f"zerofn.passes.{name}"), name) in listed_passes()


@pytest.mark.parametrize("name", pass_files())
def test_a_pass_has_a_test_of_its_name(name):
    assert has_mirror(f"zerofn.passes.{name}"), f"write tests/passes/test_{name}.py"


def listed_passes():
    """The functions of all passes that some step runs."""
    standard = importlib.import_module("zerofn.passes").standard
    return [each.fn for donating in (True, False) for each in standard(donating)]
