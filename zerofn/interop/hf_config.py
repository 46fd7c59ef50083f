"""A training step for a Hugging Face config.json: what `zerofn plan config.json` plans."""

from __future__ import annotations

import difflib
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zerofn

from .. import optim


@dataclass(frozen=True)
class Planned:
    """A step, its first state and a batch without memory, for `zerofn.plan`. `model`: the name of its class. `cuts`: of
    its leaves, over the tensor and expert axes of the mesh; `written`: the code that makes them. `num_layers`, `odd`:
    its layers, of which all but the first `odd` are alike; 0 layers where they are not, or have no number.
    """

    train_step: Callable[[Any, Any], Any]
    init_state: Callable[[], Any]
    batch: dict[str, torch.Tensor]
    model: str
    cuts: Any = None
    num_layers: int = 0
    odd: int = 0
    written: str = ""


def step_of(
    path: str | os.PathLike[str],
    context: int,
    rows: int = 1,
    mesh: zerofn.Mesh | None = None,
    *,
    capacity: float | None = None,
    sequence_parallel: bool = False,
    layers: int | None = None,
    microbatches: int = 1,
) -> Planned:
    """Return the training step of a config's model: AdamW, gradients clipped to norm 1, rows of `context` tokens. Over
    the tensor axis of `mesh` it is cut by the model's own `tp_plan`, over the expert axis by its own `ep_plan`, and
    over the context axis by `zerofn.parallel.context`.

    `path`: a config.json, or a folder with one. The model's class is the one that the config names, or the causal
    language model of its kind. `capacity`: of an expert, see `zerofn.moe.experts`. `sequence_parallel`: over the tensor
    axis, layers have parts of the tokens, and the loss is computed from slices of logits; see `zerofn.parallel.tensor`.
    `layers`: only as many of them. `microbatches`: of the rows, over which the step accumulates.
    Raises `FileNotFoundError`; `ImportError` without transformers; `ValueError` for a file that is not a config, a
    model that takes no tokens, a context that is longer than the model's positions, and for axes that do not divide
    heads, experts or the sequence, or that the model has no plan for.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"the config {os.fspath(file)!r} does not exist.")
    if context < 1 or rows < 1:
        raise ValueError(f"--context and --rows must be 1 or more, got {context} and {rows}.")
    if microbatches < 1 or rows % microbatches:
        raise ValueError(
            f"--microbatches {microbatches}: a rank's {rows} rows cannot be divided into {microbatches} "
            "equal microbatches."
        )
    config, model_class = _config(file)
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if most and context > most and not getattr(config, "rope_parameters", None):
        raise ValueError(f"--context {context}: {model_class.__name__} of this config has only {most} positions.")
    if mesh is not None:
        _check(model_class.__name__, config, mesh)
    num_layers, odd = _layers(model_class, config.to_json_string(use_diff=False)) if layers is None else (0, 0)
    if layers is not None:
        config = _shallow(config, layers)

    def build() -> torch.nn.Module:
        model: torch.nn.Module = model_class(config)
        return model

    model = zerofn.skeleton(build)
    tokens = torch.empty(rows, context, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    cuts, written = (None, "") if mesh is None else _cuts(model, mesh, capacity, sequence_parallel)
    if mesh is not None and mesh.tokens.size > 1:
        zerofn.parallel.context(model, mesh)
        batch = zerofn.parallel.split_sequence(batch, mesh)

    init_state, train_step = _training(model, build, microbatches)
    return Planned(train_step, init_state, batch, model_class.__name__, cuts, num_layers, odd, written)


def _training(model: torch.nn.Module, build: Callable[[], torch.nn.Module], microbatches: int) -> tuple[Any, Any]:
    """Return (the first state, the step) of a skeleton's training, under the name of its class."""

    def loss_fn(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(model, params, (), batch).loss
        return out

    def init_state() -> Any:
        tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4))
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=tx)

    def train_step(state: Any, batch: dict[str, torch.Tensor]) -> Any:
        vg = state.value_and_grad(loss_fn)
        loss, grads = (zerofn.accumulate(vg, microbatches) if microbatches > 1 else vg)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    train_step.__name__ = type(model).__name__
    return init_state, train_step


def _check(name: str, config: Any, mesh: zerofn.Mesh) -> None:
    """Raise `ValueError` for axes that a model cannot have, before it is made."""
    heads, size = getattr(config, "num_attention_heads", None), math.prod(axis.size for axis in mesh.partial)
    if isinstance(heads, int) and heads % size:
        raise ValueError(f"{name} has {heads} attention heads, which {size} ranks cannot divide equally.")
    if _shares_experts(mesh) and not getattr(config, "base_model_ep_plan", None):
        raise ValueError(f"{name} has no ep_plan: it has no experts, or its experts cannot be divided over ranks.")


def _shares_experts(mesh: zerofn.Mesh) -> bool:
    return any(axis.kind.experts for axis in mesh.slices)


def _cuts(
    model: torch.nn.Module, mesh: zerofn.Mesh, capacity: float | None, sequence_parallel: bool
) -> tuple[dict[str, Any] | None, str]:
    """Let a model compute with slices, over the axes along which ranks have some. Return its cuts, None without such
    axes, and the code that makes them.
    """
    cuts: dict[str, Any] = {}
    written = []
    if mesh.partial:
        own: dict[str, Any] = dict(getattr(model, "tp_plan", None) or {})
        more = _in_parts(model, own) if sequence_parallel else {}
        cuts |= zerofn.parallel.tensor(model, mesh, own | more if more else None)
        written.append(f"zerofn.parallel.tensor(model, mesh{f', model.tp_plan | {more}' if more else ''})")
    if _shares_experts(mesh):
        cuts |= zerofn.moe.experts(model, mesh, capacity=capacity)
        written.append(f"zerofn.moe.experts(model, mesh{'' if capacity is None else f', capacity={capacity}'})")
    return cuts or None, " | ".join(written)


def _in_parts(model: torch.nn.Module, plan: dict[str, Any]) -> dict[str, str]:
    """Return what is added to a model's own plan: layers have parts of the tokens, the head leaves slices of logits."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    places = {name.rpartition(".") for name, part in model.named_modules() if type(part).__name__ in kinds}
    layers = {f"{listed}.*": "sequence_parallel" for listed, _, number in places if number.isdigit()}
    if not plan or not layers:
        raise ValueError(
            f"{type(model).__name__} has no tp_plan, or no list of layers that sequence parallelism needs."
        )
    return layers | ({"lm_head": "colwise"} if "lm_head" in plan else {})


@functools.cache
def _layers(model_class: Any, text: str) -> tuple[int, int]:
    """Return how many layers a model has, and how many of the first ones are unlike the others; (0, 0) where their
    parameters do not tell. `text`: the configuration as JSON.
    """
    config = model_class.config_class.from_dict(json.loads(text))
    number = getattr(config, "num_hidden_layers", None)
    if not isinstance(number, int) or getattr(config, "is_encoder_decoder", False):
        return 0, 0
    whole, odd = _shapes(config, model_class), 0
    for listed in vars(config).values():
        if isinstance(listed, list | tuple) and len(listed) == number:  # something of each layer
            odd = max([odd, *(k + 1 for k, x in enumerate(listed) if x != listed[-1])])
    for first in range(max(odd, 1), min(number, odd + 8)):
        few, more = (_shapes(_shallow(config, n), model_class) for n in (first, first + 1))
        one = more - few
        if all(whole[x] == few[x] + (number - first) * one[x] for x in whole | more):
            return number, max(odd, first if one - few else first - 1)
    return 0, 0


def _shapes(config: Any, model_class: Any) -> Counter[Any]:
    """Return how often a model has a parameter of each shape."""
    with torch.device("meta"):
        model = model_class(config)
    return Counter(tuple(p.shape) for p in model.parameters())


def _shallow(config: Any, layers: int) -> Any:
    """Return the same configuration with fewer layers."""
    number, content = config.num_hidden_layers, config.to_dict()
    for name, x in list(content.items()):
        if isinstance(x, list | tuple) and len(x) == number:
            content[name] = list(x)[:layers]
    content["num_hidden_layers"] = layers
    found = type(config).from_dict(content)
    found.use_cache = config.use_cache
    return found


def _config(file: Path) -> tuple[Any, Any]:
    """Return (the config, the class of its model)."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{file}: a Hugging Face model needs the package transformers. Type pip install transformers."
        ) from error
    try:
        content = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}.") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(f'{file} is not the config of a model: it has no "model_type", such as "llama".')
    kind = content["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(transformers.CONFIG_MAPPING), 1, 0.7)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"{file}: transformers {transformers.__version__} does not know model_type {kind!r}. Install a newer "
            f"transformers, or correct model_type{hint}"
        )
    config = transformers.AutoConfig.for_model(**content)
    config.use_cache = False  # of generation
    named = (content.get("architectures") or [""])[0]
    automatic = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else None
    several = automatic or transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = getattr(transformers, named, None) if named else several.get(type(config), None)
    if model_class is None or not named and type(config) not in several:
        raise ValueError(f"{file}: transformers has no language model of type {kind!r} that takes tokens and labels.")
    return config, model_class
