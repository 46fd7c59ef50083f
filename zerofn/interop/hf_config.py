"""A training step for a Hugging Face config.json: what `zerofn plan config.json` plans."""

from __future__ import annotations

import json
import os
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
    its leaves, over the tensor axis of the mesh.
    """

    train_step: Callable[[Any, Any], Any]
    init_state: Callable[[], Any]
    batch: dict[str, torch.Tensor]
    model: str
    cuts: Any = None


def step_of(path: str | os.PathLike[str], context: int, rows: int = 1, mesh: zerofn.Mesh | None = None) -> Planned:
    """Return the training step of a config's model: AdamW, gradients clipped to norm 1, rows of `context` tokens. Over
    the tensor axis of `mesh` it is cut by the model's own `tp_plan`.

    `path`: a config.json, or a folder with one. The model's class is the one that the config names, or the causal
    language model of its kind. Raises `FileNotFoundError`; `ImportError` without transformers; `ValueError` for a file
    that is no config, a model that takes no tokens, a context that is longer than the model's positions, and a tensor
    axis that does not divide the heads of attention, or that the model has no plan for, and a context axis.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no config {os.fspath(file)!r}.")
    if context < 1 or rows < 1:
        raise ValueError(f"--context and --rows must be 1 or more, got {context} and {rows}.")
    config, model_class = _config(file)
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if most and context > most and not getattr(config, "rope_parameters", None):
        raise ValueError(f"--context {context}: {model_class.__name__} of this config has {most} positions.")

    def build() -> torch.nn.Module:
        model: torch.nn.Module = model_class(config)
        return model

    model = zerofn.skeleton(build)
    cuts = _cuts(model, config, mesh)

    def loss_fn(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(model, params, (), batch).loss
        return out

    def init_state() -> Any:
        tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4))
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=tx)

    def train_step(state: Any, batch: dict[str, torch.Tensor]) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    train_step.__name__ = model_class.__name__
    tokens = torch.empty(rows, context, dtype=torch.int64, device="meta")
    return Planned(train_step, init_state, {"input_ids": tokens, "labels": tokens}, model_class.__name__, cuts)


def _cuts(model: torch.nn.Module, config: Any, mesh: zerofn.Mesh | None) -> Any:
    """Let a model compute with slices over the tensor axis. Return its cuts, None without such an axis."""
    if mesh is not None and mesh.size("context") > 1:
        raise ValueError(
            "a configuration is not planned with a context axis yet; plan a script that calls zerofn.parallel.context."
        )
    size = 1 if mesh is None else mesh.size("tensor")
    if mesh is None or size == 1:
        return None
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % size:
        raise ValueError(f"{type(model).__name__} has {heads} heads of attention, which {size} ranks cannot share.")
    return zerofn.parallel.tensor(model, mesh)


def _config(file: Path) -> tuple[Any, Any]:
    """Return (the config, the class of its model)."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{file}: a model of Hugging Face's needs transformers: pip install transformers.") from error
    try:
        content = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}.") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(f'{file} is no config of a model: it has no "model_type", such as "llama".')
    kind = content["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{file}: this transformers ({transformers.__version__}) knows no model_type {kind!r}.")
    config = transformers.AutoConfig.for_model(**content)
    config.use_cache = False  # of generation
    named = (content.get("architectures") or [""])[0]
    automatic = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else None
    several = automatic or transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = getattr(transformers, named, None) if named else several.get(type(config), None)
    if model_class is None or not named and type(config) not in several:
        raise ValueError(f"{file}: there is no language model of the kind {kind!r} that takes tokens and labels.")
    return config, model_class
