"""The names that ZeroFn promises, and where a person finds them."""

import pydoc

import pytest

import zerofn
from zerofn import optim

PUBLIC = {
    zerofn: "accumulate all_finite collectives compile export first_nonfinite gather global_norm leaf_norms "
    "load load_safetensors optim plan remat save scatter shard skeleton this_machine tree_map "
    "unshard value_and_grad vdot CheckpointError DynamicLossScale Machine Mesh NoLossScale Offload "
    "Precision Sharded StaticLossScale TrainState",
    optim: "adam adamw add_decayed_weights apply_updates chain clip clip_by_global_norm constant_schedule "
    "cosine_decay_schedule exponential_decay identity join_schedules lamb linear_schedule lion masked "
    "multi_transform piecewise_constant_schedule polynomial_schedule scale scale_by_adam "
    "scale_by_learning_rate scale_by_schedule scale_by_trust_ratio set_to_zero sgd trace "
    "warmup_constant_schedule warmup_cosine_decay_schedule warmup_decay_lr "
    "warmup_exponential_decay_schedule warmup_lr AdamState EmptyState GradientTransformation LeafInfo LionState "
    "MaskedState MultiTransformState ScaleByScheduleState Schedule SgdState TraceState",
}
each_package = pytest.mark.parametrize("package", PUBLIC, ids=lambda p: p.__name__)


@each_package
def test_the_public_names(package):
    assert sorted(package.__all__) == sorted(PUBLIC[package].split())
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


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
