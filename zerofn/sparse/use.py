"""Models whose own attention goes by a layout."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch_compat import current_trace
from ..util.arguments import checked
from ..util.patches import Patches
from ..util.process import the
from ..util.watched import INERT, WRITTEN
from .attention import What, attention
from .blocks import Blocks
from .layout import Layout
from .outside import names_in
from .patterns import Pattern, booleans_of

# Who names one of these in its own methods computes attention: transformers' layers name the last.
_NAMES = {"scaled_dot_product_attention", "multi_head_attention_forward", "ALL_ATTENTION_FUNCTIONS"}
_BASES = ("torch.nn.modules.module", "transformers.modeling_utils")  # whose classes name them for other reasons
_OTHER_ROWS = ("key_value_states", "encoder_hidden_states")  # of transformers' layers, for cross attention
_ATTEND = torch.nn.functional.scaled_dot_product_attention
_AROUND = torch.nn.functional.multi_head_attention_forward


@checked("model", "layers")
def use(model: nn.Module, layout: What | None, *, layers: Sequence[int] | None = None) -> nn.Module:
    """Give a model's attention a layout, and return the model.

    `model`: its layers call `torch.nn.functional.scaled_dot_product_attention`, as transformers' do with
    `attn_implementation="sdpa"`. `layout`: as for `sparse.attention`; None restores the model's own attention. The
    model's `is_causal`, scale and dropout stay. `layers`: indices of attention layers, in the order of
    `model.modules()`; by default all. Another call changes only the layers that it names. A layout may depend on the
    step's batch, if the step itself calls `use`.

    When attention is called, raises `ValueError` if the model passes its own mask (padding, packed rows, a window),
    unless the mask is a triangle or hides nothing, if a layer computes attention in another way, or if the numbers of
    keys and queries differ. Raises `ValueError` for a model without such layers, for indices of layers that do not
    exist, and for no index.

    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> from zerofn import sparse
    >>> x = torch.randn(1, 100, 8)
    >>> sparse.use(layer, sparse.sliding_window(10) & sparse.causal)(x, x, x, need_weights=False)[0].shape
    torch.Size([1, 100, 8])
    """
    if not (layout is None or isinstance(layout, Pattern | Layout | Blocks) or callable(layout)):
        raise TypeError(
            "sparse.use: layout must be a pattern, a Layout, Blocks or a function of (head, query, key), got "
            f"{type(layout).__name__}. None removes the layout."
        )
    found = [(name, x) for name, x in model.named_modules() if _attends(type(x))]
    if not found:
        raise ValueError(
            f"sparse.use: no layer of {type(model).__name__} calls torch.nn.functional.scaled_dot_product_attention in "
            "its methods. Write sparse.attention(q, k, v, layout) where it computes attention."
        )
    if layers is not None and not len(layers):
        raise ValueError("sparse.use: layers is empty, so no layer would change. Leave it out to mean all layers.")
    for number in range(len(found)) if layers is None else layers:
        if not 0 <= number < len(found):
            raise ValueError(
                f"sparse.use: attention layer {number} does not exist; {type(model).__name__} has {len(found)} "
                f"attention layers, from 0 to {len(found) - 1}."
            )
        name, module = found[number]
        own = vars(module).get("forward")
        if isinstance(own, _Forward):
            own.no_fast_path.remove()
            own = own.own
        if layout is not None:
            vars(module)["forward"] = _Forward(module, name, layout, own)
        elif own is not None:
            vars(module)["forward"] = own
        else:
            vars(module).pop("forward", None)
        _of_the_step(module, current_trace() is not None)
    return model


def _of_the_step(module: nn.Module, so: bool) -> None:
    """Note whether the step that is being captured sets the layout itself: then a change of it is no reason for another
    capture.
    """
    others = vars(module).pop(WRITTEN, frozenset()) - {"forward"}
    if so or others:
        vars(module)[WRITTEN] = others | ({"forward"} if so else set())


def in_use() -> bool:
    """Return whether a layer is running whose attention goes by a layout."""
    return bool(the(_Running).modes)


def layout_in_use() -> What | None:
    """Return the layout of the layer that is running, for attention that obeys it by other means; None in others."""
    modes = the(_Running).modes
    for mode in modes:
        mode.num_calls += 1
    return modes[-1].layout if modes else None


class _Running(threading.local):
    """The layouts of the layers that a thread is running, innermost last."""

    def __init__(self) -> None:
        self.modes: list[_ByLayout] = []


class _Forward:
    """A module's `forward` with attention by a layout. `own`: what was put in place of the class's `forward` before."""

    def __init__(self, module: nn.Module, name: str, layout: What, own: Any) -> None:
        self.module, self.name, self.layout, self.own = module, name, layout, own
        vars(self)[WRITTEN] = frozenset({"no_fast_path"})
        # torch's TransformerEncoderLayer calls no attention in its fast path, which it leaves where there are hooks.
        self.no_fast_path = module.register_forward_pre_hook(_nothing)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain())

    def _plain(self) -> Any:
        return self.own if self.own is not None else type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_own_rows(args, kwargs)
        mode = _ByLayout(self._where(), self.layout)
        the(_Running).modes.append(mode)
        try:
            with mode:
                out = self._plain()(*args, **kwargs)
        finally:
            the(_Running).modes.pop()
        if not mode.num_calls:
            raise ValueError(
                f"{self._where()} does not compute attention by torch.nn.functional.scaled_dot_product_attention, so "
                'the layout has no effect. Build a transformers model with attn_implementation="sdpa"; call '
                "nn.MultiheadAttention with need_weights=False."
            )
        return out

    def _check_own_rows(self, args: Any, kwargs: Any) -> None:
        """Raise `ValueError` for attention to the rows of another module."""
        try:
            given = self.__signature__.bind_partial(*args, **kwargs).arguments
        except TypeError:  # the module itself says what is wrong
            return
        given = {**given, **given.get("kwargs", {})}
        apart = "query" in given and "key" in given and given["query"] is not given["key"]
        if apart or any(given.get(name) is not None for name in _OTHER_ROWS):
            raise ValueError(
                f"{self._where()} attends to rows other than its own (cross attention), but a layout is for "
                "self-attention. Leave this layer out of layers=."
            )

    def _where(self) -> str:
        at = f"layer {self.name!r} ({type(self.module).__name__})" if self.name else type(self.module).__name__
        return f"sparse.use: {at}"


class _ByLayout(TorchFunctionMode):
    """Inside, attention goes by a layout."""

    def __init__(self, where: str, layout: What) -> None:
        super().__init__()
        self._where, self.layout, self.num_calls = where, layout, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func`, or attention by the layout in its place."""
        if func is _AROUND:  # it runs without this mode, and calls attention
            with _inside_seen:
                return func(*args, **(kwargs or {}))
        if func is not _ATTEND:
            return func(*args, **(kwargs or {}))
        for mode in the(_Running).modes:
            mode.num_calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            is_causal = is_causal or self._is_triangle(attn_mask)
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"{self._where} has {query.shape[-2]} queries and {key.shape[-2]} keys, but a layout needs "
                "self-attention, with as many queries as keys. Build the model with use_cache=False, or leave its "
                "cross attention out of layers=."
            )
        return attention(query, key, value, self.layout, is_causal=is_causal, scale=scale, dropout=dropout_p)

    def _is_triangle(self, mask: Tensor) -> bool:
        """Return whether a mask is a triangle; False if it hides nothing. Raises `ValueError` for others."""
        if type(mask) in (Tensor, nn.Parameter):
            allowed = booleans_of(mask)
            if allowed is not None and bool(allowed.all()):
                return False
            triangle = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
            if allowed is not None and mask.shape[-1] == mask.shape[-2] and bool((allowed == triangle).all()):
                return True
        raise ValueError(
            f"{self._where} received a mask {list(mask.shape)} from the model, but the layout must be the only mask. "
            "Models make a mask from padding, from positions that start again, and from a sliding window. Leave "
            "attention_mask and position_ids out of the batch, build the model without a sliding window, and write the "
            "mask as the layout, such as sparse.documents(cu_seqlens) & sparse.sliding_window(1024)."
        )


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that does nothing."""


setattr(_nothing, INERT, True)


def _seeing(attend: Any) -> Any:
    @functools.wraps(attend)
    def attended(*args: Any, **kwargs: Any) -> Any:
        with the(_Running).modes[-1] if the(_Running).modes else contextlib.nullcontext():
            return attend(*args, **kwargs)

    return attended


_inside_seen = Patches(lambda: [(torch.nn.functional, "scaled_dot_product_attention", _seeing)])


def _attends(kind: type) -> bool:
    """Return whether a class of modules computes attention itself."""
    own = [x for x in kind.__mro__ if issubclass(x, nn.Module) and x.__module__ not in _BASES]
    methods = (inspect.unwrap(f) for x in own for f in vars(x).values() if isinstance(f, FunctionType))
    return any(_NAMES & set(names_in(f.__code__)) for f in methods if isinstance(f, FunctionType))
