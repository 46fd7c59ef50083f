"""The names that ZeroFn promises, and where a person finds them."""

import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import zerofn
from docs import reference
from zerofn import collectives, moe, optim, parallel, passes, random, schedules, sparse

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = {
    zerofn: "abort abstract accumulate all_finite because collectives compile copy diloco eager_region even export "
    "export_dcp first_nonfinite from_deepspeed gather global_norm leaf_norms load load_dcp load_deepspeed "
    "load_safetensors load_state_dict microbatched moe normal_like optim parallel passes peak_flops plan progress "
    "random rank register_step_pre_hook remat run same sampler save saved_paths scatter schedules shard skeleton "
    "sparse this_machine tree_map unshard value_and_grad vdot "
    "verify world_size "
    "CaptureError CheckpointError Checkpoints DynamicLossScale Fp8 Machine Mesh NoLossScale Offload Pass "
    "Precision Sharded StaticLossScale TrainState Wire",
    optim: "adafactor adagrad adam adamw adaptive_grad_clip add_decayed_weights apply_updates chain clip "
    "clip_by_block_rms clip_by_global_norm constant_schedule cosine_decay_schedule cosine_onecycle_schedule ema "
    "exponential_decay from_functions identity inject_hyperparams join_schedules lamb linear_schedule lion "
    "lookahead masked multi_transform muon nadamw onebit_adam onebit_lamb params_ema piecewise_constant_schedule "
    "polynomial_schedule radam rmsprop scale scale_by_adam scale_by_factored_rms scale_by_learning_rate "
    "scale_by_muon scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rss scale_by_schedule "
    "scale_by_shape scale_by_stddev scale_by_trust_ratio set_to_zero sgd sgdr_schedule trace "
    "warmup_constant_schedule warmup_cosine_decay_schedule warmup_decay_lr warmup_exponential_decay_schedule "
    "warmup_lr zero_one_adam About AdamState EmaState EmptyState FactoredState Fused GradientTransformation "
    "InjectHyperparamsState LeafInfo LionState LookaheadState MaskedState MultiTransformState MuonState "
    "OneBitLambState OneBitState ParamsEmaState ScaleByRStdDevState ScaleByRmsState ScaleByRssState "
    "ScaleByScheduleState Schedule SgdState TraceState",
    random: "fold_in key randomness",
    collectives: "all_gather all_reduce all_to_all broadcast mean permute psum reduce_scatter same vary Linear "
    "LinearMap",
    moe: "combine cuts dispatch dropped experts gumbel jitter layer load_balance_loss own residual route z_loss Aux "
    "Routing",
    passes: "after before standard Context Pass PassError",
    schedules: "balance best check fill make messages simulate stage_costs usual_limit Action "
    "Compute Costs Edge Kind Message NAMES Part Placement Receive Schedule Send Sent Timeline",
    sparse: "attention causal chosen deepspeed documents everything layout padding pattern prefix sinks sliding_window "
    "use Blocks Layout Pattern",
    parallel: "attention balanced_chunks context cross_entropy pipe split_sequence tensor tiled_loss Chunks Slice",
}
MODULES = ["collectives", "moe", "optim", "parallel", "passes", "random", "schedules", "sparse"]  # the public ones
each_package = pytest.mark.parametrize("package", PUBLIC, ids=lambda p: p.__name__)


@each_package
def test_the_public_names(package):
    assert sorted(package.__all__) == sorted(PUBLIC[package].split())
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    assert dir(package) == sorted(package.__all__)  # what completion offers


def test_the_version():
    assert zerofn.__version__.count(".") == 2
    assert f"VERSION\n    {zerofn.__version__}" in pydoc.render_doc(zerofn, renderer=pydoc.plaintext)


@each_package
def test_help_shows_them(package):
    text = pydoc.render_doc(package, renderer=pydoc.plaintext)
    for name in package.__all__:
        thing = getattr(package, name)
        shown = f"class {name}(" if isinstance(thing, type) else f"    {name}"
        assert shown in text or f"class {name}\n" in text, name


@pytest.mark.parametrize(
    "name", ["all_finite", "first_nonfinite", "gather", "global_norm", "leaf_norms", "scatter", "unshard", "vdot"]
)
def test_what_all_ranks_must_call_says_so(name):
    assert "ll ranks must call it" in " ".join(getattr(zerofn, name).__doc__.split())


# Slow or large, and needed by some programs only, or later. torch's first fake tensor brings dynamo and sympy.
HEAVY = "tensordict torch._dynamo sympy rich psutil matplotlib transformers cupy".split()


USES_ALL_NAMES = f"""
import sys, torch
before = set(sys.modules)
import zerofn
print(sorted(m for m in set(sys.modules) - before if not m.startswith("zerofn") and m != "importlib.util"))
for name in zerofn.__all__:
    getattr(zerofn, name)
print(sorted(m for m in {HEAVY} if m in set(sys.modules) - before))
"""
IMPORTS_ALL_MODULES = """
import importlib, pkgutil
import zerofn
assert zerofn.tree.leaves({"a": 1}) == [1] and zerofn.collectives.__name__ == "zerofn.collectives"
try:
    zerofn.shrad
except AttributeError as error:
    print(error)
import zerofn.compile, zerofn.optim.adamw
for package in (zerofn, zerofn.optim):  # a module is an attribute of its own package alone
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
print([n for p in (zerofn, zerofn.optim) for n in p.__all__ if type(getattr(p, n)).__name__ == "module"])
"""
IN_FORKS = """
import os, sys, torch
for code in sys.argv[1:]:
    if os.fork() == 0:
        exec(code, {})
        break
    assert os.wait()[1] == 0
    print("---", flush=True)
"""


@pytest.fixture(scope="module")
def said():
    """What two programs say in new processes, which have torch alone: one of them imports it for both."""
    command = [sys.executable, "-c", IN_FORKS, USES_ALL_NAMES, IMPORTS_ALL_MODULES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [x.strip() for x in done.stdout.split("---\n")]


@pytest.mark.slow
def test_import_brings_nothing_heavy(said):
    """Nor does the first use of every public name."""
    assert said[0] == "[]\n[]"


@pytest.mark.slow
def test_submodules_load_when_asked_for_and_none_takes_a_public_names_place(said):
    assert said[1] == f"module 'zerofn' has no attribute 'shrad'. Did you mean zerofn.shard?\n{MODULES}"


def test_the_reference_has_every_public_name_and_a_page_for_each_group():
    pages = reference.pages()
    text = "\n".join(pages.values())
    for package in PUBLIC:
        for name in package.__all__:
            value = getattr(package, name)
            if hasattr(value, "__module__") and not inspect.ismodule(value):
                assert f"{name}\n" in text, f"{package.__name__}.{name}"
    nav = (ROOT / "docs/mkdocs.yml").read_text()
    assert [x for x in pages if f": {x}\n" not in nav] == []


def test_a_public_name_without_a_group_is_said(monkeypatch):
    monkeypatch.setitem(reference.GROUPS, "Replicas that train apart", [("zerofn.training.diloco", "Diloco")])
    with pytest.raises(ValueError, match=r"no group has zerofn\.diloco\. Add them to GROUPS"):
        reference.pages()
