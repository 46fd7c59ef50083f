"""What comes before every compiled step."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from ..util.process import the
from .interrupts import deliver


class StepPreHooks(OrderedDict[int, Callable[[], object]]):
    """What is called, in the order in which it was registered."""


def before_step() -> None:
    """Run the handler of an interrupt that came during the last step, and the hooks."""
    deliver()
    for hook in tuple(the(StepPreHooks).values()):
        hook()


def register_step_pre_hook(hook: Callable[[], object]) -> RemovableHandle:
    """Call `hook()` before every compiled step of this process, and return a handle whose `remove()` ends that.

    If the hook raises, the step does not run, and the state is unchanged. So a hook that raises `KeyboardInterrupt`
    before the same step on every rank stops a loop at a point where all ranks can continue. The counterpart in
    `torch.optim` is `register_optimizer_step_pre_hook`. Raises `TypeError` if `hook` cannot be called without
    arguments.

    >>> import torch, zerofn
    >>> hook = register_step_pre_hook(lambda: print("a step begins"))
    >>> step = zerofn.compile(lambda state, x: state["w"] * x)
    >>> step({"w": torch.ones(2)}, torch.ones(2))
    a step begins
    tensor([1., 1.])
    >>> hook.remove()
    """
    try:
        inspect.signature(hook).bind()
    except (TypeError, ValueError) as error:  # ValueError: of a builtin that tells no signature
        if not callable(hook) or isinstance(error, TypeError):
            raise TypeError(
                f"register_step_pre_hook: hook must be a function that can be called without arguments, got {hook!r}."
            ) from None
    hooks = the(StepPreHooks)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
