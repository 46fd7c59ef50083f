"""Optimizers as pairs of pure functions, with optax's names and shapes."""

from .adamw import adam, adamw
from .base import EmptyState, GradientTransformation, LeafInfo, apply_updates
from .chain import chain
from .clip import clip, clip_by_global_norm
from .decay import add_decayed_weights
from .identity import identity, set_to_zero
from .lamb import lamb
from .lion import LionState, lion
from .masked import MaskedState, masked
from .multi_transform import MultiTransformState, multi_transform
from .scale import ScaleByScheduleState, scale, scale_by_learning_rate, scale_by_schedule
from .scale_by_adam import AdamState, scale_by_adam
from .schedules import (
    Schedule,
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    polynomial_schedule,
)
from .sgd import SgdState, sgd
from .trace import TraceState, trace
from .trust_ratio import scale_by_trust_ratio
from .warmup import (
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
    warmup_decay_lr,
    warmup_exponential_decay_schedule,
    warmup_lr,
)

__all__ = [
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "exponential_decay",
    "identity",
    "join_schedules",
    "lamb",
    "linear_schedule",
    "lion",
    "masked",
    "multi_transform",
    "piecewise_constant_schedule",
    "polynomial_schedule",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "set_to_zero",
    "sgd",
    "trace",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_decay_lr",
    "warmup_exponential_decay_schedule",
    "warmup_lr",
    "AdamState",
    "EmptyState",
    "GradientTransformation",
    "LeafInfo",
    "LionState",
    "MaskedState",
    "MultiTransformState",
    "ScaleByScheduleState",
    "Schedule",
    "SgdState",
    "TraceState",
]
