"""Small twins: a small model of the same class as a large one, with real values in float64.

We compare its computation in parts with its computation as a whole. A twin has a few layers, of the same kinds as the
large model's; its heads and widths are small, in the same proportions.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..util.patterns import pattern_of

LIMIT = 1e-6  # of the largest number, by which a twin in parts may be off: models compute some things in float32
_VOCABULARY = 96
_MOST = 1 << 22  # parameters of a twin
_EXPERTS = 8
_WINDOW = 4  # tokens: fewer than in the rows that are compared
_LAYERS = r"(num_(hidden_|encoder_|decoder_)?|n_|encoder_|decoder_|attn_)layers?|n_layer"
_HEADS = r"(num_|n_)?(encoder_|decoder_|self_|swa_)?(attention_)?heads?|num_attn_heads"
_KEY_HEADS = r"(swa_)?(num_)?(key_value|kv|multi_query)_heads|n_head_kv|num_query_groups|num_key_value_heads"
_OF_HEAD = r"\w*(head_dim|head_size|d_head|dim_head|d_kv|kv_channels|rotary_dim|rope_dim|attention_head_size)"
_OF_VOCABULARY = r"\w*vocab_size\w*"
_OF_WINDOW = r"(sliding_|attention_)?(window(_size)?|chunk_size)|local_attention|sliding_window_size|block_size"
_OF_POSITIONS = r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length"
_OF_EXPERTS = r"(num_|n_|moe_num_)(local_|routed_)?experts|num_local_experts|moe_num_experts"
_GROUPS = r"n_groups?|num_expert_groups?"
_CHOSEN = r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k|num_selected_experts"
_WIDTH = r"\w*(size|dim|width|rank|ffn|inner|embd|d_model|d_ff|dff|d_inner|ffn_dim|channels)"
_NO_WIDTH = r"\w*(image|patch|batch|kernel|type|token|memory|hash|group|conv|max|num_)\w*"


class NoTwin(Exception):
    """No small twin of a model can be made; the message says why."""


def small_twin(model: nn.Module, parts: int, kind_of: Callable[[str], Any] = lambda name: None) -> nn.Module:
    """Return a small model of the same class as a transformers skeleton, on the CPU and in float64.

    `parts`: the number of ranks that share its heads, if they share the heads of `model`. `kind_of`: a function of a
    module's name, whose result distinguishes kinds of layers further. Random generators are left unchanged. Raises
    `NoTwin`.
    """
    config = getattr(model, "config", None)
    if not hasattr(model, "_from_config") or not hasattr(config, "get_text_config"):
        raise NoTwin(f"{type(model).__name__} is not a transformers model")
    errors = []
    for candidate in _candidates(model, config, parts, kind_of):
        try:
            with torch.device("meta"):
                size = sum(x.numel() for x in _new(model, candidate).parameters())
            if size > _MOST:
                errors.append(f"the smallest model has {size:,} parameters")
                continue
            with torch.random.fork_rng(()):
                torch.manual_seed(0)
                twin = _new(model, candidate).double().eval()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        _refuse_other_modules(model, twin)
        _fill(twin)
        return twin
    raise NoTwin(f"the model's config cannot be made small: {'; '.join(dict.fromkeys(errors))}")


def few_ranks(size: int) -> int:
    """Return the smallest number of ranks, above 1, that behaves as `size` ranks do."""
    return next(n for n in range(2, size + 1) if size % n == 0)


def inputs_of(twin: nn.Module, length: int) -> dict[str, Tensor]:
    """Return two rows of a twin's input: `length` tokens, or an image. Raises `NoTwin` for other inputs."""
    config: Any = twin.config
    name = str(getattr(twin, "main_input_name", "input_ids"))
    if name == "pixel_values":
        numbers, image = torch.Generator().manual_seed(2), config.image_size
        sides = tuple(image) if isinstance(image, list | tuple) else (image, image)
        return {name: torch.randn(2, config.num_channels, *sides, generator=numbers, dtype=torch.float64)}
    if name != "input_ids":
        raise NoTwin(f"the model's input is {name}, not tokens or an image")
    ids = rows_of(twin, length)
    return {name: ids, "decoder_input_ids": ids.flip(0)} if config.is_encoder_decoder else {name: ids}


def rows_of(twin: nn.Module, length: int) -> Tensor:
    """Return two rows of tokens [2, length], none of which has a meaning."""
    config: Any = twin.config
    numbers, special = torch.Generator().manual_seed(2), special_tokens(twin)
    plain = [x for x in range(min(_VOCABULARY, config.get_text_config().vocab_size)) if x not in special]
    return torch.tensor(plain)[torch.randint(len(plain), (2, length), generator=numbers)]


def special_tokens(twin: nn.Module) -> list[int]:
    """Return the tokens of a twin that have a meaning, such as padding."""
    config: Any = twin.config
    values = [x for name, x in vars(config.get_text_config()).items() if name.endswith("token_id")]
    return sorted({x for x in values if isinstance(x, int) and 0 <= x < _VOCABULARY})


def outputs_of(out: Any) -> list[Tensor]:
    """Return the tensors of real numbers among what a module returns."""
    values = out.values() if hasattr(out, "values") and not isinstance(out, Tensor) else out
    each = values if isinstance(values, Iterable) and not isinstance(values, Tensor) else [values]
    return [x for x in each if isinstance(x, Tensor) and x.is_floating_point()]


def difference(x: Tensor, y: Tensor) -> float:
    """Return how much two tensors differ, relative to the largest number of the second one."""
    if x.shape != y.shape:
        return float("inf")
    return float((x - y).abs().max() / y.abs().max().clamp(min=1e-300)) if x.numel() else 0.0


def other_gradient(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Return the name of the first parameter with a different gradient, and the difference; or an empty text."""
    largest = max((float(x.abs().max()) for x in expected.values() if x.numel()), default=0.0)
    for name, x in expected.items():
        off = float((found[name] - x).abs().max()) if x.numel() else 0.0
        if not off <= LIMIT * largest + 100 * LIMIT * (float(x.abs().max()) if x.numel() else 0.0):
            return f"{name}, off by {off / max(largest, 1e-300):.1g} of the largest"
    return ""


def _new(model: Any, config: Any) -> Any:
    made = type(model)._from_config(copy.deepcopy(config), dtype=torch.float32)
    made.config.use_cache = False
    return made


def _refuse_other_modules(model: nn.Module, twin: nn.Module) -> None:
    def kinds(x: nn.Module) -> set[tuple[str, type]]:
        return {(pattern_of(name), type(part)) for name, part in x.named_modules()}

    other = kinds(model) ^ kinds(twin)
    if other:
        names = sorted(name for name, _ in other)
        raise NoTwin(f"the module {names[0]!r} differs from the one in a model that is built from the config")


@torch.no_grad()
def _fill(twin: nn.Module) -> None:
    """Change all parameters from their initial values, such as biases of zero."""
    numbers = torch.Generator().manual_seed(1)
    for x in twin.parameters():
        noise = torch.randn(x.shape, generator=numbers, dtype=torch.float64)
        x.add_(noise, alpha=0.2 if x.dim() < 2 else x.shape[-1] ** -0.5)


def _candidates(model: nn.Module, config: Any, parts: int, kind_of: Callable[[str], Any]) -> Iterator[Any]:
    """Yield configs, the smallest first."""
    for least_head in (8, 16, None):
        found = copy.deepcopy(config)
        found._attn_implementation = None  # the model's default, which may be another on a GPU
        found._experts_implementation = "batched_mm"  # in any dtype
        for one in {id(x): x for x in (found, found.get_text_config())}.values():
            _shrink(one, model, parts, kind_of, least_head)
        yield found


def _shrink(config: Any, model: nn.Module, parts: int, kind_of: Callable[[str], Any], least_head: int | None) -> None:
    for number in {x for name, x in _numbers(config) if re.fullmatch(_LAYERS, name) and x > 1}:
        _fewer_layers(config, number, _kinds(model, number, kind_of))
    heads, head = _scales(config, parts, least_head)
    groups = max((x for name, x in _numbers(config) if re.fullmatch(_GROUPS, name)), default=1)
    chosen = max((x for name, x in _numbers(config) if re.fullmatch(_CHOSEN, name)), default=1)
    experts = groups * max(2, -(-max(_EXPERTS, chosen) // groups))
    for name, value in _numbers(config):
        of_experts = re.fullmatch(_OF_EXPERTS, name)
        new = min(value, experts) if of_experts else _smaller(name, value, heads, head, least_head is not None)
        if new != value:
            _set(config, name, new)
    for name, value in list(vars(config).items()):
        if re.fullmatch(_OF_WINDOW, name) and isinstance(value, list | tuple):
            _set(config, name, type(value)(min(x, _WINDOW) if isinstance(x, int) else x for x in value))
    _special_tokens(config)


def _smaller(name: str, value: int, heads: int, head: int, widths: bool) -> int:
    if re.fullmatch(_OF_VOCABULARY, name):
        return min(value, _VOCABULARY)
    if re.fullmatch(_OF_WINDOW, name):
        return min(value, _WINDOW)
    if re.fullmatch(_OF_POSITIONS, name):
        return min(value, 256)
    if re.fullmatch(_HEADS, name) or re.fullmatch(_KEY_HEADS, name):
        return value // heads if value % heads == 0 else value
    if re.fullmatch(_OF_HEAD, name):
        return value // head if value % head == 0 else value
    if widths and value > 32 and re.fullmatch(_WIDTH, name) and not re.fullmatch(_NO_WIDTH, name):
        scale = heads * head
        return value // scale if value % scale == 0 and value // scale >= 4 else max(16, value // scale // 8 * 8)
    return value


def _scales(config: Any, parts: int, least_head: int | None) -> tuple[int, int]:
    """Return the divisors for numbers of heads, and the size of a head."""
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int) or not heads:
        return (1, 1) if least_head is None or not isinstance(width, int) else (1, max(1, width // 32))
    groups = getattr(config, "num_key_value_heads", None) or heads
    common = math.gcd(heads, groups) if isinstance(groups, int) else heads
    fewer = next(n for n in range(1, common + 1) if common % n == 0 and (n % parts == 0 or common % parts))
    if common == heads and fewer == 1:
        fewer = next((n for n in range(2, common + 1) if common % n == 0), 1)
    if least_head is None:
        return common // fewer, 1
    sizes = [x for name, x in _numbers(config) if re.fullmatch(_OF_HEAD, name) and x > 1] or [width // heads]
    if width % heads and len(sizes) == 1:
        return common // fewer, 2 * least_head  # a width of its own
    size = math.gcd(*sizes)
    return common // fewer, size // least_head if size % least_head == 0 and size > least_head else 1


def _numbers(config: Any) -> list[tuple[str, int]]:
    """Return the whole numbers of a config, by the names that it keeps them by."""
    return [(k, x) for k, x in vars(config).items() if isinstance(x, int) and not isinstance(x, bool)]


def _set(config: Any, name: str, value: Any) -> None:
    object.__setattr__(config, name, value)  # numbers fit each other when all are changed


def _fewer_layers(config: Any, number: int, wanted: int) -> None:
    for name, x in list(vars(config).items()):
        if isinstance(x, list | tuple) and len(x) == number:
            _set(config, name, type(x)(x[:wanted]))
        elif x == number and re.fullmatch(_LAYERS, name) and not isinstance(x, bool):
            _set(config, name, wanted)


def _kinds(model: nn.Module, number: int, kind_of: Callable[[str], Any]) -> int:
    """Return how many layers, from the first one, are needed to have one of each kind; 2 at least."""
    wanted = min(2, number)
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == number:
            kinds = [_kind(f"{name}.{k}", layer, kind_of) for k, layer in enumerate(part)]
            wanted = max(wanted, *(kinds.index(x) + 1 for x in kinds))
    return wanted


def _kind(where: str, layer: nn.Module, kind_of: Callable[[str], Any]) -> Any:
    found = []
    for name, part in layer.named_modules():
        own = {k: x for k, x in vars(part).items() if isinstance(x, bool | str | None)}
        own.pop("training", None)
        full = f"{where}.{name}" if name else where
        found.append((name, type(part), sorted(own.items(), key=str), kind_of(full)))
    return found


def _special_tokens(config: Any) -> None:
    """Give tokens with a meaning numbers that are in the vocabulary, different ones."""
    taken = 0
    for name, value in list(vars(config).items()):
        if name.endswith("token_id") and (isinstance(value, int) or isinstance(value, list) and value):
            first = value if isinstance(value, int) else value[0]
            if first >= _VOCABULARY or isinstance(value, list):
                _set(config, name, _VOCABULARY - 1 - taken)
                taken += 1
