"""Record what a function does to tensors, without doing it.

The function runs on fake tensors (shapes, no data) under a dispatch mode that logs every ATen call
as a `LoggedCall` on buffer versions (see `call_log.py`). Tensors are told apart by storage and geometry,
never by object. So views, `detach`, `.data = ...` and `nn.Parameter` are not operations at all, and
only two kinds of calls are logged: those that make new buffers and those that write into old ones.
A write that overwrites a whole buffer unread begins a new version of it. Random calls also depend
on each other, in program order.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._torch_compat import (
    CONVERT_MODULE,
    REJECTION_SAMPLERS,
    DataDependentError,
    DynamicShapeError,
    FakeTensor,
    TorchDispatchMode,
    is_composite,
    storage_key,
    tree_leaves,
    tree_map,
    without_dispatch_modes,
)
from ..ops.registry import ASKS_METADATA
from ..tracing.shortcut import Shortcut
from ..util.user_line import user_place
from .call_log import BufferView, LoggedCall, Version, closure
from .effects import ALLOCATE, FILL_LIKE, covers, is_random, mapped, overwrites, tensors, written_tensors
from .one_thread import OneThreadsFakes
from .quantised import quantised_refused, refuse_quantised
from .rng_marks import GeneratorWatch, Restore, SavedState

aten = torch.ops.aten

_INSTEAD = "Make it before, outside the function, or pass `shard` the finished state instead."
_SEEDS_ELSEWHERE = (
    "initialisation draws on a device other than the CPU and also sets seeds, which can be "
    "replayed on the CPU only. Seed before `shard`, not inside the function, or draw on the CPU."
)


class Recorder(TorchDispatchMode):
    """Logs calls into `calls` and buffer versions into `versions`. Enter it with `recording()`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LoggedCall] = []
        self.versions: list[Version] = []
        self.fake_mode = OneThreadsFakes(allow_non_fake_inputs=True)
        self.watch = GeneratorWatch()
        self._current: dict[int, int] = {}  # storage key -> its version now
        self._last_random: int | None = None
        self._draws_elsewhere = False  # on a device whose generators are not watched

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not all(map(_is_fake, tensors((args, kwargs)))):
            args, kwargs = tree_map(self.as_fake, (tuple(args), kwargs))
        if func is aten.lift_fresh.default:
            return args[0]
        if func is aten.detach.default:  # no operation, as said above: the most frequent one
            return func(*args)
        if func is aten._local_scalar_dense.default:
            return self.evaluate(func, args, kwargs)
        if is_composite(func) and func not in ASKS_METADATA:  # inference mode shows it whole, with its effects hidden
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        try:
            out = func(*args, **kwargs)
        except (DataDependentError, DynamicShapeError):
            return self.evaluate(func, args, kwargs)
        # A resize or a transposition in place moves no data: it must not be mistaken for a write.
        if torch.Tag.inplace_view not in func.tags:
            self._log(func, args, kwargs, out)
        return out

    # --- tensors

    def as_fake(self, x: Any) -> Any:
        """A real tensor that the function brought along becomes a constant; anything else is
        returned as it is."""
        if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
            return x
        _require_plain(x)
        with without_dispatch_modes():
            real = x.detach()
            fake = self.fake_mode.from_tensor(real)
        if storage_key(fake) not in self._current:
            self._new_version(fake, constant=real.untyped_storage())
        return fake

    def region(self, tensor: torch.Tensor) -> BufferView:
        """`tensor` as a geometry on the version its buffer has now."""
        key = storage_key(tensor)
        if key not in self._current or tensor.is_neg():
            raise RuntimeError(
                f"{user_place()}: a tensor of shape {tuple(tensor.shape)} comes from an operation that cannot be "
                f"replayed, such as torch.load. {_INSTEAD}"
            )
        return BufferView(
            self._current[key],
            tensor.dtype,
            tensor.device,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
        )

    def _new_version(self, tensor: torch.Tensor, constant: torch.UntypedStorage | None = None) -> int:
        storage = tensor.untyped_storage()
        self._current[storage_key(tensor)] = len(self.versions)
        self.versions.append(Version(storage, tensor.device, constant))
        return len(self.versions) - 1

    # --- the log

    def _log(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.name().partition(".")[0]
        written = written_tensors(func, args, kwargs)
        for tensor in tensors(out):
            _require_plain(tensor)
        fresh = [t for t in tensors(out) if storage_key(t) not in self._current]
        if not written and not fresh:
            return  # a view, or a question about shapes
        if name in ALLOCATE:
            self._new_version(fresh[0])
        elif name in FILL_LIKE and kwargs.get("generator") is None:
            self._new_version(fresh[0])
            fill, fill_args = FILL_LIKE[name](*args)
            self.log_call(fill, (fresh[0], *fill_args), {}, None, [fresh[0]])
        else:
            self.log_call(func, args, kwargs, out, written)

    def log_call(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[torch.Tensor]) -> None:
        """Append a call of `func` that writes into `written` and makes what is new in `out`."""
        draws = is_random(func)
        restores, saves = self._before_draw(func, args, kwargs) if draws else ([], [])
        for restore in restores:
            self.log_restore(restore)
        index = len(self.calls)
        call = LoggedCall(func, (), {}, [], set(), draws, saves=saves)
        written_keys = {storage_key(t) for t in written}
        for tensor in tensors((args, kwargs)):
            if storage_key(tensor) not in written_keys:
                self._reads(call, index, self.region(tensor).version)
        self._writes(call, index, func, args, kwargs, written)
        call.args, call.kwargs = mapped(self._as_region, (tuple(args), dict(kwargs)))
        for tensor in tree_leaves(out):
            is_new = isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self._current
            if is_new:
                self.versions[self._new_version(tensor)].last_write = index
            call.outputs.append(self.region(tensor) if is_new else None)
        call.versions |= {r.version for r in call.outputs if r is not None}
        self._append(call)

    def _reads(self, call: LoggedCall, index: int, version: int) -> None:
        state = self.versions[version]
        call.versions.add(version)
        state.readers.append(index)
        if state.last_write is not None:
            call.value_deps.add(state.last_write)

    def _writes(self, call: LoggedCall, index: int, func: Any, args: Any, kwargs: Any, written: list[Any]) -> None:
        read_keys = [storage_key(t) for t in tensors((args, kwargs))]
        for tensor in written:
            key = storage_key(tensor)
            if overwrites(func, kwargs, tensor) and covers(tensor) and read_keys.count(key) == 1:
                version = self._new_version(tensor)
            else:
                version = self.region(tensor).version
                state = self.versions[version]
                if state.last_write is not None:
                    call.value_deps.add(state.last_write)
                call.order_deps.update(state.readers)
            state = self.versions[version]
            state.is_written, state.last_write, state.readers = True, index, []
            call.versions.add(version)

    def _append(self, call: LoggedCall) -> None:
        if call.is_random:
            if self._last_random is not None:
                call.order_deps.add(self._last_random)
            self._last_random = len(self.calls)
        call.value_deps.discard(len(self.calls))
        call.order_deps -= call.value_deps | {len(self.calls)}
        self.calls.append(call)

    def log_restore(self, restore: Restore) -> None:
        """Log that the function set a generator's state."""
        if self._draws_elsewhere:
            raise RuntimeError(_SEEDS_ELSEWHERE)
        self._append(LoggedCall(restore, (), {}, [], set(), True, saves=restore.saves))

    def _before_draw(self, func: Any, args: Any, kwargs: Any) -> tuple[list[Restore], list[SavedState]]:
        generator = next((a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Generator)), None)
        devices = {t.device.type for t in tensors((args, kwargs))} | {torch.device(kwargs.get("device") or "cpu").type}
        if generator is None and devices == {"cpu"}:
            generator = torch.default_generator
        if generator is None or generator.device.type != "cpu":
            self._draws_elsewhere = True
            generator = torch.default_generator  # so that a seed set before is noticed
        restores, saves = self.watch.before_draw(generator)
        if self._draws_elsewhere and self.watch.reseeded:
            raise RuntimeError(_SEEDS_ELSEWHERE)
        return restores, saves

    def _as_region(self, x: Any) -> Any:
        return self.region(x) if isinstance(x, torch.Tensor) else x

    # --- values that Python asks for

    def evaluate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func` on real values, its results constants; raises where they depend on a random
        draw."""
        return tree_map(self.as_fake, self.value(func, args, kwargs))

    def value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`func` on real values, where they depend on no random draw; raises where they do."""
        regions = [self.region(t) for t in tensors((args, kwargs))]
        roots = [self.versions[r.version].last_write for r in regions]
        needed = closure(self.calls, [r for r in roots if r is not None])
        if any(self.calls[i].is_random for i in needed):
            raise RuntimeError(
                f"{user_place()}: initialisation reads the value of a random tensor here ({func}), which is not drawn "
                "yet. Use torch.where instead of a branch, or pass the finished state to `shard` instead of a function."
            )
        args, kwargs = tree_map(self._as_region, (args, kwargs))
        final = LoggedCall(func, args, kwargs, [], set(), False)
        constants = [v.constant for v in self.versions]
        try:
            with without_dispatch_modes():
                buffers: dict[int, torch.UntypedStorage | None] = {}
                for call in [*(self.calls[i] for i in sorted(needed)), final]:
                    result = call.run(buffers, self.versions)
        finally:
            for version, constant in zip(self.versions, constants, strict=True):
                version.constant = constant
        return result


def _is_fake(x: torch.Tensor) -> bool:
    return isinstance(x, FakeTensor)


def _require_plain(x: torch.Tensor) -> None:
    refuse_quantised(type(x))
    own = (torch.Tensor.__torch_dispatch__, FakeTensor.__torch_dispatch__)
    if x.layout != torch.strided or type(x).__torch_dispatch__ not in own:
        raise RuntimeError(
            f"{user_place()}: initialisation can replay dense plain tensors only, but found a {type(x).__name__} with "
            f"layout {x.layout}. {_INSTEAD}"
        )


class _Conversions(TorchFunctionMode):
    """Answers what a fake tensor answers wrongly, because it has no memory: its values for NumPy
    and Python, its address (which people compare to find tied weights), its deep copy."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_fake = bool(args) and isinstance(args[0], FakeTensor)
        if func in (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist):
            if is_fake:
                args = (self.recorder.value(aten.clone.default, (args[0],), {}), *args[1:])
            with without_dispatch_modes():
                return func(*args, **kwargs)
        if is_fake and func is torch.Tensor.data_ptr:
            return storage_key(args[0]) + args[0].storage_offset() * args[0].element_size()
        if is_fake and func is torch.Tensor.__deepcopy__:
            return _deepcopy(*args)
        return func(*args, **kwargs)


def _deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


_recording = threading.RLock()  # the patches below are global


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Inside, this process's tensor operations are logged, not done. The generators are left as
    they were."""
    with _recording:
        recorder = Recorder()
        originals = [(module, name, getattr(module, name)) for module, name in REJECTION_SAMPLERS]
        try:
            for module, name, function in originals:
                setattr(module, name, _as_one_call(recorder, function))
            originals.append((torch.utils, "swap_tensors", torch.utils.swap_tensors))
            torch.utils.swap_tensors = _set_data
            for owner, name, wrap in [(*CONVERT_MODULE, _moving), *((x, "__new__", _refusing_lazy) for x in _LAZY)]:
                originals.append((owner, name, getattr(owner, name)))
                setattr(owner, name, wrap(getattr(owner, name)))
            with recorder.fake_mode, Shortcut(), recorder, _Conversions(recorder), quantised_refused:
                yield recorder
            for restore in recorder.watch.finish():
                recorder.log_restore(restore)
            recorder.fake_mode.check()
        finally:
            recorder.watch.reset()
            for module, name, function in originals:
                setattr(module, name, function)


def _as_one_call(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """How often a rejection sampler draws depends on what it drew: log it whole, as one
    operation."""

    @functools.wraps(function)
    def log(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        recorder.log_call(function, (recorder.as_fake(tensor), *args), kwargs, None, [recorder.as_fake(tensor)])
        return tensor

    return log


def _moving(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """How a module converts its parameters here. Those that go to "meta" or come from it (`to_empty`) are new objects
    then, as outside of a recording, and tied ones are tied no more."""

    @functools.wraps(apply)
    def moved(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        made: dict[int, torch.Tensor] = {}
        new: dict[str, nn.Parameter | None] = {}
        before = dict(self._parameters)
        for name, param in before.items():
            if isinstance(param, FakeTensor):
                with torch.no_grad():
                    made[id(param)] = result = fn(param)
                if (param.device.type == "meta") != (result.device.type == "meta"):
                    new[name] = nn.Parameter(result, param.requires_grad)
        self._parameters.update(dict.fromkeys(new))  # `apply` leaves out what is None
        apply(self, lambda x: made.pop(id(x)) if id(x) in made else fn(x), False)
        self._parameters.update(new)
        return self

    return moved


_LAZY: tuple[Any, ...] = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)


def _refusing_lazy(new: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        if isinstance(torch.empty(0), FakeTensor):  # in this thread
            raise RuntimeError(
                f"{user_place()}: initialisation makes a lazy layer, which has no shapes until it is called. Give the "
                "layer its sizes (nn.Linear instead of nn.LazyLinear), or pass `shard` the finished state instead of "
                "a function."
            )
        return new(*args, **kwargs)

    return made


def _set_data(old: torch.Tensor, new: torch.Tensor) -> None:
    """How `module.to(dtype)` converts parameters here. It swaps fake tensors, but not those that
    something refers to weakly, as their mode does to them all."""
    old.data = new.data
