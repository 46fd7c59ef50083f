"""Optimizers and learning-rate schedules as pure functions, with optax's names and arguments.

A transformation works on any tree of tensors. Of a `Sharded` tree it updates this rank's shards, one flat tensor for
each *unit* (FSDP's parameter group). Masks and labels are functions of logical leaves, never of shards.

How an update runs: a `GradientTransformation` is optax's pair `init` and `update` (`base.py`). AdamW, SGD and Lion
also have one fused operation for each unit (`fused.py`), from `zerofn.ops`. A constant that differs among leaves, such
as weight decay under a mask, is stored once for each run of elements with the same value (`leaf_runs.py`). `masked`
and `multi_transform` select leaves (`select.py`); leaves that are not selected count as padding.

Steps of several kinds (`phases.py`): 1-bit Adam sends gradients up to its freeze step, and signs from then on. That
is another step, with other transfers, so another capture. A word in the treedef of the optimizer's state says which
kind comes next. It follows from the number of updates. `compile` changes it between two steps, on the host, and reads
the number again only when the next kind could have begun.

1-bit optimizers (`onebit.py`, `onebit_adam.py`, `onebit_lamb.py`, `zero_one_adam.py`) sum gradients over ranks
themselves. `value_and_grad` then returns the gradients of each rank unsummed, as entries `[ranks, *shape]`
(`zerofn/sharding/rank_entries.py`). The rounding errors of the signs stay on their rank, stored as entries
`[ranks, *shape]`. So finite checks, norms and checkpoints need no special case. Signs are made after the finite check,
so their transfers do not overlap the backward pass; they are 1/31.75 of a gradient. The momentum is computed in
float32 only where it is stored, by the operation that updates the parameters (`zerofn/ops/frozen_adamw.py`).

Invariant: hyperparameters are checked before anything is traced or allocated (`checks.py`), and schedules are torch
operations of the number of updates, so a step can capture them.

Start reading: `base.py`, then `adamw.py`.
"""

from typing import TYPE_CHECKING

from ..util.names import of_package
from .adafactor import adafactor
from .adagrad import ScaleByRssState, adagrad, scale_by_rss
from .adamw import adam, adamw
from .adaptive_clip import adaptive_grad_clip
from .base import About, EmptyState, Fused, GradientTransformation, LeafInfo, apply_updates
from .block_rms import clip_by_block_rms, scale_by_param_block_rms
from .chain import chain
from .clip import clip, clip_by_global_norm
from .cycles import cosine_onecycle_schedule, sgdr_schedule
from .decay import add_decayed_weights
from .ema import EmaState, ema
from .factored_rms import FactoredState, scale_by_factored_rms
from .functions import from_functions
from .identity import identity, set_to_zero
from .inject import InjectHyperparamsState, inject_hyperparams
from .lamb import lamb
from .lion import LionState, lion
from .lookahead import LookaheadState, lookahead
from .masked import MaskedState, masked
from .multi_transform import MultiTransformState, multi_transform
from .muon import muon
from .nadamw import nadamw
from .onebit import OneBitState
from .onebit_adam import onebit_adam
from .onebit_lamb import OneBitLambState, onebit_lamb
from .params_ema import ParamsEmaState, params_ema
from .radam import radam, scale_by_radam
from .rms import ScaleByRmsState, ScaleByRStdDevState, scale_by_rms, scale_by_stddev
from .rmsprop import rmsprop
from .scale import ScaleByScheduleState, scale, scale_by_learning_rate, scale_by_schedule
from .scale_by_adam import AdamState, scale_by_adam
from .scale_by_muon import MuonState, scale_by_muon, scale_by_shape
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
from .zero_one_adam import zero_one_adam

__all__ = [
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "adaptive_grad_clip",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "cosine_onecycle_schedule",
    "ema",
    "exponential_decay",
    "from_functions",
    "identity",
    "inject_hyperparams",
    "join_schedules",
    "lamb",
    "linear_schedule",
    "lion",
    "lookahead",
    "masked",
    "multi_transform",
    "muon",
    "nadamw",
    "onebit_adam",
    "onebit_lamb",
    "params_ema",
    "piecewise_constant_schedule",
    "polynomial_schedule",
    "radam",
    "rmsprop",
    "scale",
    "scale_by_adam",
    "scale_by_factored_rms",
    "scale_by_learning_rate",
    "scale_by_muon",
    "scale_by_param_block_rms",
    "scale_by_radam",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_shape",
    "scale_by_stddev",
    "scale_by_trust_ratio",
    "set_to_zero",
    "sgd",
    "sgdr_schedule",
    "trace",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_decay_lr",
    "warmup_exponential_decay_schedule",
    "warmup_lr",
    "zero_one_adam",
    "About",
    "AdamState",
    "EmaState",
    "EmptyState",
    "FactoredState",
    "Fused",
    "GradientTransformation",
    "InjectHyperparamsState",
    "LeafInfo",
    "LionState",
    "LookaheadState",
    "MaskedState",
    "MultiTransformState",
    "MuonState",
    "OneBitLambState",
    "OneBitState",
    "ParamsEmaState",
    "ScaleByRStdDevState",
    "ScaleByRmsState",
    "ScaleByRssState",
    "ScaleByScheduleState",
    "Schedule",
    "SgdState",
    "TraceState",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = of_package(__name__, __all__)
