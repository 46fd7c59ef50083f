"""Optimizers as pairs of pure functions, with optax's names and shapes."""

from .adamw import AdamState as AdamState
from .adamw import adam as adam
from .adamw import adamw as adamw
from .base import GradientTransformation as GradientTransformation
from .base import LeafInfo as LeafInfo
from .base import apply_updates as apply_updates
from .chain import chain as chain
from .clip import clip_by_global_norm as clip_by_global_norm
