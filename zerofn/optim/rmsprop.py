"""RMSProp, plain, centered or with momentum."""

from __future__ import annotations

from ..util.arguments import checked
from . import checks
from .base import GradientTransformation, ScalarOrSchedule, named
from .chain import chain
from .rms import check_average, scale_by_rms, scale_by_stddev
from .scale import scale_by_learning_rate
from .torch_optimizers import told
from .trace import trace


@told
@checked("eps_in_sqrt", "centered", "momentum", "nesterov", "bias_correction")
def rmsprop(
    learning_rate: ScalarOrSchedule,
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: float | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> GradientTransformation:
    """RMSProp (Hinton 2012), with optax's arguments.

    A chain of `scale_by_rms` (`scale_by_stddev` if `centered`), `scale_by_learning_rate` and, with `momentum`,
    `trace`. `torch.optim.RMSprop(alpha=decay)` has the arithmetic of `eps_in_sqrt=False`. Raises `ValueError` for
    hyperparameters out of range, and for `nesterov` without momentum.

    >>> from zerofn import optim
    >>> tx = optim.rmsprop(1e-3, eps_in_sqrt=False, momentum=0.9)
    """
    checks.learning_rate("rmsprop", learning_rate)
    check_average("rmsprop", decay, eps, initial_scale)
    checks.number("rmsprop", 0.0, momentum=momentum or 0.0)
    if nesterov and momentum is None:
        raise ValueError("rmsprop: nesterov=True needs momentum, such as momentum=0.9; got momentum=None.")
    scaled = scale_by_stddev if centered else scale_by_rms
    parts = [scaled(decay, eps, initial_scale, eps_in_sqrt, bias_correction), scale_by_learning_rate(learning_rate)]
    if momentum is not None:
        parts.append(trace(momentum, nesterov))
    args = (learning_rate, decay, eps, initial_scale, eps_in_sqrt, centered, momentum, nesterov, bias_correction)
    return named(chain(*parts), "rmsprop", *args)
