"""The log lines of a compiled step: one for each capture, and a warning if it is captured again and again. And a sign
of life on a terminal, where a capture takes long.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ..capture.float8_products import none_is_float8
from ..graph.program import Program, tensor_of
from ..job.agreement import rank_and_size
from ..ops import cpu, cuda
from ..util.sign_of_life import sign_of_life
from ..util.sizes import in_words, time_in_words
from ..util.visible_log import show_log
from .captured_step import CapturedStep

log = logging.getLogger("zerofn")
_OUTSIDE = "something outside its arguments"
MANY = 8  # captures of one step before a warning: a few shapes are normal
_NAMED = 5  # parameters in a warning
F = TypeVar("F", bound=Callable[..., Any])


def while_capturing(method: F) -> F:
    """Wrap a method of a compiled step, so that a terminal shows while it runs that a step is being captured."""

    @functools.wraps(method)
    def shown(self: Any, *args: Any) -> Any:
        with sign_of_life(f"capturing {self.__name__}"):
            return method(self, *args)

    return shown  # type: ignore[return-value]


def told_of(num_signatures: int, entries: Sequence[CapturedStep], timings: dict[str, Any], options: Any) -> str:
    """Return what a compiled step says of itself: its captures, and the options that matter."""
    told = ["not captured yet"]
    if entries:
        seconds = timings["capture"] + sum(timings["passes"].values())
        signatures = f"{num_signatures} signature{'s' if num_signatures > 1 else ''}"
        told = [f"captured for {signatures}, the last {timings['nodes']:,} nodes in {time_in_words(seconds)}"]
    donates = any(x.donating for x in entries) if entries else options.donate
    told.append("donates its state" if donates else "keeps its state")
    if options.memory is not None:
        told.append(f"at most {in_words(options.memory)} on a rank's device")
    told += [f"remat={options.remat!r}"] if options.remat else []
    told += [f"planned for {options.machine.name}"] if options.machine is not None else []
    return "; ".join(told)


class CaptureLog:
    """Logs the captures of one step."""

    def __init__(self, name: str) -> None:
        show_log()
        self._name = name
        self._before: dict[str, str] = {}  # inputs of the last capture: entry -> shape and dtype, or number
        self._changes: Counter[str] = Counter()  # entry -> captures in which it differed from the one before
        self._num_captures = 0
        self._unused: set[str] = set()  # parameters that were told of

    def report(
        self, program: Program, constants: Sequence[Tensor], seconds: float, donating: bool, why: str = ""
    ) -> None:
        """Log one line: what changed since the last capture, the closed-over tensors, and the time it took.

        `why`: what changed outside the step's arguments, if that is why it was captured again.
        """
        now = program.describe()
        pairs = {k: (self._before.get(k, "nothing"), now.get(k, "nothing")) for k in {**now, **self._before}}
        changes = {k: f"{k.rstrip('.')} {was} -> {is_now}" for k, (was, is_now) in pairs.items() if was != is_now}
        if why:
            changes = {_OUTSIDE: why}
        self._warn(changes, {f"batch.{name}" for name in program.batch.baked})
        why = "; ".join([*changes.values()][:3]) or "another structure"
        again = " again" if self._before else ""
        if not self._before:
            why = "first call"
        self._before = now
        for device in {x.device.type for x in map(tensor_of, program.placeholders) if x is not None and x.dim()}:
            _tell_of_kernels(device)
        self._tell_of_unused(program)
        if program.float8 is not None and none_is_float8(program.float8) and rank_and_size()[0] == 0:
            log.warning("%s: with precision='fp8', %s", self._name, _no_products(program.float8))
        log.info(
            "%s: captured%s (%s): %s, %d nodes, %.2f s%s",
            self._name,
            again,
            why,
            _kind(program, donating),
            len(program.gm.graph.nodes),
            seconds,
            _baked(constants),
        )

    def _tell_of_unused(self, program: Program) -> None:
        """Warn, once and on the first rank, of trained parameters that no loss uses."""
        names = [name for name in program.unused if name not in self._unused]
        if not names or program.new_state is None or rank_and_size()[0] > 0:
            return
        self._unused.update(names)
        log.warning(
            "%s: no loss uses %s%s. The gradients of unused parameters are zero, so weight decay and old moments still "
            "change them; torch's optimizers would not. To keep them unchanged, write TrainState.create(..., "
            "frozen=...).",
            self._name,
            ", ".join(map(repr, names[:_NAMED])),
            f" and {len(names) - _NAMED} more parameters" if len(names) > _NAMED else "",
        )

    def _warn(self, changes: dict[str, str], numbers: set[str]) -> None:
        """At the `MANY`-th capture, warn: say which entry changed most often, and what to do about it.

        `numbers`: the entries that are not tensors.
        """
        self._num_captures += 1
        self._changes.update(changes.keys() if self._before else ())
        if self._num_captures != MANY or not self._changes:
            return
        key = self._changes.most_common(1)[0][0]
        if key == _OUTSIDE:
            advice = (
                "a step is captured again when a value that it reads outside its arguments changes: pass that "
                "value in the batch"
            )
        elif key in numbers:
            advice = "a step is captured again for every new number: pass torch.tensor(...) instead"
        else:
            advice = "a step is captured again for every new shape: pad to a few shapes"
        log.warning(
            "%s: captured %d times so far, %d of them because %s changed (%s); %s.",
            self._name,
            MANY,
            self._changes[key],
            key,
            changes.get(key, "not in this capture"),
            advice,
        )


def _no_products(float8: Mapping[str, str]) -> str:
    """Say why no product is float8. `float8`: see `Program`."""
    name, why = next(iter(float8.items()), ("", ""))
    return (
        "no product is float8, all are bfloat16"
        + (f". Of {name!r}, for example: {why}" if name else ", as there is no matrix among the parameters")
        + ". Float8 products are torch.nn.functional.linear(x, w) and torch.addmm(b, x, w), if w is a parameter as the "
        "loss function received it, not a view."
    )


def _kind(program: Program, donating: bool) -> str:
    if program.new_state is None:
        return "evaluation step"
    return "training step, state donated" if donating else "training step"


def _baked(constants: Sequence[Tensor]) -> str:
    if not constants:
        return ""
    return f"; {len(constants)} closed-over tensors baked in, shapes {[tuple(c.shape) for c in constants[:4]]}"


@functools.cache
def _tell_of_kernels(device: str) -> None:
    """Warn, once for each device type, that update rules run as torch operations, as the kernels are missing."""
    if rank_and_size()[0] > 0:
        return
    kernels = {"cpu": cpu, "cuda": cuda}.get(device)
    why = kernels.missing() if kernels is not None else None
    if why:
        chosen = os.environ.get("ZEROFN_NATIVE") == "0"
        log.log(logging.INFO if chosen else logging.WARNING, "%s torch's operations do the same, more slowly.", why)
