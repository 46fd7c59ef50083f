"""`zerofn.progress`: a loader that shows, while it is iterated over, how the training goes."""

from __future__ import annotations

import html
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import zerofn

from ..util.arguments import checked
from .sinks import Sink, sinks_of

B = TypeVar("B")  # a batch


class Progress(Generic[B]):
    """See `progress`. `records`: what was shown so far, a dict of plain numbers for each line."""

    def __init__(
        self,
        loader: Iterable[B],
        every: int,
        total: int | None,
        initial: int,
        tokens: Callable[[B], int] | None,
        to: Any,
        step: Any = None,
    ) -> None:
        for name, steps, least in (("every", every, 1), ("initial", initial, 0)):
            if not isinstance(steps, int) or isinstance(steps, bool) or steps < least:
                raise ValueError(f"progress: {name} must be a whole number of steps of {least} or more, got {steps!r}.")
        if step is not None and not isinstance(getattr(step, "flops", None), int):
            raise TypeError(
                f"progress: step= must be the step that zerofn.compile returned, got {type(step).__name__}."
            )
        self._loader, self._every, self._tokens, self._step, self._flops = loader, every, tokens, step, 0
        self._total = initial + len(loader) if total is None and isinstance(loader, Sized) else total
        shown = not dist.is_initialized() or dist.get_rank() == 0
        self._sinks: list[Sink] = sinks_of(to) if shown else []
        self._line = Line() if shown else None
        self.records: list[dict[str, Any]] = []
        self._steps, self._counted = initial, 0  # so far; tokens or rows since the last line
        self._unit = "rows"
        self._aux: Mapping[str, Any] = {}
        self._state: Any = None

    def __iter__(self) -> Iterator[B]:
        self._since, self._before, pid = time.perf_counter(), self._steps, os.getpid()
        try:
            for batch in self._loader:
                yield batch
                self._steps += 1
                self._count(batch)
                if self._steps % self._every == 0:
                    self._show()
            if self._steps > self._before:
                self._show()
        finally:
            if os.getpid() == pid:  # a process that is forked in the loop leaves it, too
                if self._line is not None:
                    self._line.end()
                for sink in self._sinks:
                    sink.close()

    def log(self, metrics: Mapping[str, Any] | None = None, state: Any = None, **more: Any) -> None:
        """Log what the step returned. Nothing is read from the device before the next line is due.

        `metrics`: numbers and scalar tensors by name. `state`: of which skipped steps and the loss scale are shown.
        Raises `TypeError` for metrics that are not a mapping, such as the pair that the step returns.
        """
        if metrics is not None and not isinstance(metrics, Mapping):
            raise TypeError(
                f"progress.log: expected the step's metrics, a dict, got {type(metrics).__name__}. Write state, "
                "metrics = step(state, batch); bar.log(metrics, state)."
            )
        self._aux, self._state = {**(metrics or {}), **more}, state

    def print(self, *words: Any) -> None:
        """Print text, as `print` does, on rank 0, after removing the current line of figures."""
        if self._line is not None:
            self._line.clear()
            print(*words, flush=True)

    def _count(self, batch: Any) -> None:
        self._flops += 0 if self._step is None else self._step.flops
        if self._tokens is not None:
            self._counted, self._unit = self._counted + self._tokens(batch), "tokens"
            return
        tensors = [x for x in leaves(batch) if isinstance(x, Tensor) and x.dim()]
        ids = next((x for x in tensors if x.dim() > 1 and not x.is_floating_point()), None)
        if ids is not None:
            self._counted, self._unit = self._counted + ids.shape[0] * ids.shape[1], "tokens"
        elif tensors:
            self._counted += tensors[0].shape[0]

    def _show(self) -> None:
        if self._line is None:
            self._counted = self._flops = 0
            return
        record: dict[str, Any] = {"step": self._steps}
        record |= {name: value for name, x in self._aux.items() if (value := number(x)) is not None}
        if isinstance(self._state, zerofn.TrainState):
            record["skipped"] = int(self._state.skipped)
            scale = getattr(self._state.loss_scale, "loss_scale", None)
            if scale is not None:
                record["loss_scale"] = float(scale)
        now = time.perf_counter()  # after what was read from the device: steps that it had ahead are over
        seconds, steps = now - self._since, self._steps - self._before
        record["ms_per_step"] = 1e3 * seconds / steps
        if self._counted:
            record[f"{self._unit}_per_s"] = self._counted * _num_parts() / seconds
        if self._flops:
            record["tflops"] = self._flops / seconds / 1e12
            if (peak := zerofn.peak_flops()) is not None:
                record["mfu"] = self._flops / seconds / peak
        record["peak_bytes"] = peak_bytes()
        if self._total is not None and self._total >= self._steps:
            record["eta_s"] = (self._total - self._steps) * seconds / steps
        self._since, self._before, self._counted, self._flops = now, self._steps, 0, 0
        self.records.append(record)
        share = self._steps / self._total if self._total is not None and self._total >= self._steps > 0 else None
        self._line.show(self.text(record), share)
        for sink in self._sinks:
            sink.write(record)

    def text(self, record: Mapping[str, Any]) -> str:
        """Return a record as a line."""
        known = ("step", "ms_per_step", "tokens_per_s", "rows_per_s", "tflops", "mfu", "peak_bytes", "eta_s", "skipped",
                 "loss_scale")  # fmt: skip
        parts = [f"{record['step']}{'' if self._total is None else f'/{self._total}'}"]
        parts += [f"{name} {value:.4g}" for name, value in record.items() if name not in known]
        parts.append(f"{record['ms_per_step']:.0f} ms/step")
        parts += [f"{record[x]:,.0f} {x[:-6]}/s" for x in ("tokens_per_s", "rows_per_s") if x in record]
        if "tflops" in record:
            parts.append(f"{record['tflops']:.3g} TFLOP/s" + (f" (MFU {record['mfu']:.1%})" if "mfu" in record else ""))
        parts.append(f"{record['peak_bytes'] / 1e9:.2f} GB")
        if record.get("skipped"):
            parts.append(f"{record['skipped']} skipped")
        if "loss_scale" in record:
            parts.append(f"scale {record['loss_scale']:g}")
        if record.get("eta_s"):
            parts.append(f"{clock(record['eta_s'])} left")
        return "  ".join(parts)


@checked("loader", "total", "tokens")
def progress(
    loader: Iterable[B],
    every: int = 10,
    *,
    total: int | None = None,
    initial: int = 0,
    tokens: Callable[[B], int] | None = None,
    to: str | Sink | Sequence[str | Sink] = (),
    step: Any = None,
) -> Progress[B]:
    """Return an iterable over `loader` that shows a line of figures at every `every`-th step, on rank 0.

        bar = zerofn.progress(loader, every=10)
        for batch in bar:
            state, metrics = step(state, batch)
            bar.log(metrics, state)

    The line shows the metrics that were logged last, ms/step and tokens/s (of all ranks) since the last line, this
    rank's peak memory, skipped steps, the loss scale, and the remaining time if the loader has a length or `total` is
    set. Showing a line waits for the device. In a terminal and in a notebook, a new line replaces the last one;
    elsewhere each is printed on a new line. `bar.print(...)` prints other text, on rank 0. For a resumed run, pass
    `initial`, the number of steps done before; `total` includes them.

    `step`: the compiled step. With it, the line also shows this rank's TFLOP/s, which count matrix products of the
    model (without recomputed ones), and on a known GPU their share of its peak (MFU). `tokens(batch) -> int`: number of
    tokens of a rank's batch; by default the number of elements of its first 2-d tensor of integers, or its number of
    rows if it has no such tensor. `to`: further destinations, one or several of: a path that ends in .jsonl,
    "tensorboard:FOLDER", "wandb" or "trackio" (for the run that you have started), and objects with `write(record)` and
    `close()`. Raises `ValueError` for an `every` below 1, an `initial` below 0 or an unknown destination, `ImportError`
    for a destination whose library is not installed.

    >>> bar = progress([torch.ones(4, 3)] * 2, every=2)
    >>> for rows in bar:
    ...     bar.log({"loss": rows.mean()})
    >>> bar.records[0]["step"], bar.records[0]["loss"]
    (2, 1.0)
    """
    return Progress(loader, every, total, initial, tokens, to, step)


def _num_parts() -> int:
    """Return the number of ranks with rows of their own: others count the same rows."""
    try:
        return zerofn.world_size("rows")
    except ValueError:  # of several meshes
        return zerofn.world_size()


def leaves(batch: Any) -> Iterator[Any]:
    """Yield what a batch is made of: dicts and lists are looked into."""
    for x in batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ():
        yield from leaves(x)
    if not isinstance(batch, Mapping | list | tuple):
        yield batch


def number(x: Any) -> float | None:
    """Return a number or a tensor of one element as a float; None for anything else."""
    if isinstance(x, Tensor):
        return float(x) if x.numel() == 1 and not x.is_complex() else None
    return float(x) if isinstance(x, int | float) else None


def peak_bytes() -> int:
    """Return the most memory that this process has had: on its GPU, or of the host where there is none."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def clock(seconds: float) -> str:
    """Return a time as it is said.

    >>> clock(5.2), clock(75), clock(7322)
    ('5 s', '1:15', '2:02:02')
    """
    whole = math.ceil(seconds - 0.5)
    hours, rest = divmod(whole, 3600)
    if whole < 60:
        return f"{whole} s"
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class Bar:
    """A line for notebooks, with a bar before it if the share of steps is known."""

    def __init__(self, text: str, share: float | None) -> None:
        self._text, self._share = text, share

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        text, share = f'<span style="white-space:pre-wrap">{html.escape(self._text)}</span>', self._share
        row = "display:flex;align-items:center;gap:10px;font-family:monospace"
        if share is None:
            return f'<div style="{row}">{text}</div>'
        # In the colours of the text, so that it looks the same on light and dark pages.
        full = f'<div style="width:{100 * share:.1f}%;height:100%;background:currentColor;opacity:0.6"></div>'
        frame = "flex:0 0 160px;height:10px;border:1px solid currentColor;border-radius:3px;overflow:hidden"
        return f'<div style="{row}"><div role="progressbar" style="{frame}">{full}</div>{text}</div>'


class Line:
    """One line that is written over, in a notebook or a terminal; lines one below the other elsewhere."""

    def __init__(self) -> None:
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        self._notebook = shell is not None and hasattr(shell, "kernel")
        self._terminal = not self._notebook and sys.stderr.isatty()
        self._handle: Any = None
        self._width = 0

    def show(self, text: str, share: float | None = None) -> None:
        """Write the line. `share`: of the steps, from 0 to 1, which a notebook shows as a bar."""
        if self._notebook:
            from IPython.display import display

            if self._handle is None:
                self._handle = display(Bar(text, share), display_id=True)
            else:
                self._handle.update(Bar(text, share))
        elif self._terminal:
            sys.stderr.write("\r" + text.ljust(self._width))
            sys.stderr.flush()
            self._width = len(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away from a terminal; it comes again."""
        if self._terminal and self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            sys.stderr.flush()
            self._width = 0

    def end(self) -> None:
        """Leave the line as it is."""
        if self._terminal and self._width:
            sys.stderr.write("\n")
        self._handle, self._width = None, 0
