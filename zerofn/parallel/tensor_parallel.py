"""Tensor parallelism in the local (Megatron) form: a rank's leaves are slices, and modules call linear maps.

A column-sliced layer gets `vary` before it, and a row-sliced layer `psum` after it. The two maps are transposes of each
other, so gradients, and everything derived from them, are those of the whole layer. Nothing of the model changes except
the forwards of the layers that the plan names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives.maps import Concat, Linear, Psum, Take, VaryLast
from ..comm.axes import TENSOR
from ..comm.mesh import Axis, Mesh
from ..geometry.cuts import Cut, equal
from ..random.mode import draw_by_place
from ..util.arguments import checked
from ..util.patterns import matches
from .applied_once import once
from .check_plan import check_plan
from .cross_entropy import give_loss_of_slices
from .cut_experts import CutExperts
from .heads import Attributes, change_numbers, check_matrices, check_numbers, is_one_a_head, size_of_head
from .local_ranks import LOCAL
from .plan import Slice, did_you_mean, of_matrix, slice_of
from .plan_errors import Explained, Trail, check_attention, check_module, is_transposed
from .sequence_parallel import TokenRegion, refuse_outputs_of_layers
from .shared_inputs import Varied, with_varied_parameters


@checked()
def tensor(
    model: nn.Module, mesh: Mesh, plan: Mapping[str, str | Slice] | None = None, *, attributes: Attributes | None = None
) -> dict[str, Cut]:
    """Let a skeleton compute with slices of its layers over the mesh's axis "tensor"; return the cuts, for `shard`.

        mesh = zerofn.Mesh.make(data=-1, tensor=2)
        model = zerofn.skeleton(build)
        state = zerofn.shard(init_state, mesh=mesh, cuts=zerofn.parallel.tensor(model, mesh))

    `plan`: maps names of modules or parameters, where `*` matches a number or any single component of a name, to a word
    of transformers' `tp_plan` or to a `Slice`; by default the model's own `tp_plan`. Layers inside attention are sliced
    at whole heads. If there are fewer key and value heads than ranks, several ranks hold the same head, and its
    gradients are summed. You may add two entries to a model's own plan:

    - "model.layers.*": "sequence_parallel": between attention and MLP, ranks have parts of the tokens;
    - "lm_head": "colwise": logits stay sliced by vocabulary, and the model's loss is computed from slices.

    `attributes`: maps module names to {attribute: function of (value, ranks)}, for numbers that modules store, such as
    the number of heads: {"blocks.*.attn": {"num_heads": lambda heads, ranks: heads // ranks}}. A module with
    `head_dim`, or another name for the size of a head, counts as attention.

    An embedding that shares its weight with a column-sliced LM head ("tied") is sliced with it.

    A plan other than the model's own is tested first: a small model of the same class, sliced by this plan, must have
    the outputs and gradients of the whole model, in float64 to 1e-6. If no small model can be made, the log says so.

    Raises `ValueError` for a mesh without the axis, for a model without a plan, for an entry that matches nothing, for
    an unknown word, for a parameter that several modules share and the plan slices for only some of them, for heads
    that ranks cannot divide, and for a plan with which the model computes different values.
    """
    axis, own = mesh.axis(TENSOR), getattr(model, "tp_plan", None) or {}
    if plan is None:
        plan = own
        if not plan:
            raise ValueError(f"{type(model).__name__} has no tp_plan. Pass plan={{'layers.*.up': 'colwise', ...}}.")
    if axis.size == 1:
        return {}
    once("tensor", model)
    of_family = {key for key, word in plan.items() if own.get(key) == word}  # a model's own plan is its whole family's
    entries = {key: slice_of(key, value) for key, value in plan.items()}
    made = _Maker(model, mesh, axis, of_family, entries)
    for key, how in sorted(entries.items(), key=lambda entry: entry[1].kind != "sequence"):
        if not made.take(key, how) and key not in of_family:
            raise ValueError(f"plan[{key!r}] matches no module and no parameter{made.near(key)}")
    made.close()
    if not made.cuts:
        raise ValueError(f"the plan of {type(model).__name__} slices none of its parameters.")
    for name, layers in made.owners.items():
        check_numbers(name, model.get_submodule(name), attributes or {}, layers)
    change_numbers(model, attributes or {}, axis.size)
    if (attributes or dict(plan) != dict(own)) and axis.group != LOCAL:
        check_plan(model, axis, plan, attributes, tensor)
    return made.cuts


class _Maker:
    """Collects the cuts of a model, and gives its layers their maps."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, axis: Axis, of_family: set[str], entries: Mapping[str, Slice]
    ) -> None:
        self.cuts: dict[str, Cut] = {}
        self.owners: dict[str, list[str]] = {}  # module -> its linear layers that are cut, not by an entry `of_family`
        self._entries = entries
        self._mesh, self._axis, self._of_family = mesh, axis, of_family
        self._modules = dict(model.named_modules())
        self._params = dict(model.named_parameters())
        names = {id(p): name for name, p in self._params.items()}
        self._name_of = {
            (path, last): names[id(p)]
            for path, part in self._modules.items()
            for last, p in part._parameters.items()
            if p is not None
        }
        self._taken: dict[str, str] = {}
        self._cut_in: dict[str, set[str]] = {}  # weight -> modules by which it is cut
        self._grouped: dict[int, int] = {}  # module of attention -> query heads for each key head, of all ranks
        self._regrouped: set[int] = set()
        self._varied: dict[str, Varied] = {}  # by the module whose layers take what varies
        self._regions: list[TokenRegion] = []
        self._head = getattr(model, "get_output_embeddings", lambda: None)()
        self._with_varied_parameters: set[str] = set()
        self._trail, self._words = Trail(), dict[str, Slice]()

    def near(self, key: str) -> str:
        """Return the end of a sentence that offers the nearest name."""
        return did_you_mean(key, self._modules)

    def take(self, key: str, how: Slice) -> bool:
        """Apply one entry of the plan. Return whether it matches anything."""
        modules = [name for name in self._modules if name and matches(key, name)]
        params = [name for name in self._params if matches(key, name)]
        for name in modules + params:
            if name in self._taken:
                raise ValueError(f"plan[{key!r}] and plan[{self._taken[name]!r}] both match {name!r}; leave one out.")
            self._taken[name] = key
        if how.kind == "sequence":
            refuse_outputs_of_layers(key, self._modules[""])
            self._region(key, modules)
            return bool(modules)
        for name in params:
            check_matrices(name, self._modules[name.rpartition(".")[0]], how)
            self._cut(name, self._params[name], how, name)
        for name in modules:
            self._module(name, self._modules[name], how)
        return bool(modules or params)

    def close(self) -> None:
        """Slice all modules that share a parameter with a sliced module. Give their maps to modules whose layers have
        maps.
        """
        for (path, last), name in self._name_of.items():
            others = self._cut_in.get(name, set())
            if last == "weight" and others and path not in others:
                self._tied(path, name, min(others))
        for where, varied in self._varied.items():
            above = self._modules[where]
            above.forward = varied.inside(above.forward)
        for region in self._regions:
            region.close(set(self.cuts), self._with_varied_parameters)
        check_attention(self._modules, self.cuts)
        model = self._modules[""]
        model.forward = Explained(model, self._trail, self._words, self.cuts).inside(model.forward)

    def _region(self, key: str, names: list[str]) -> None:
        """Note layers that compute with parts of the tokens: those of one list follow one another."""
        for _, found in itertools.groupby(names, key=lambda name: name.rpartition(".")[0]):
            self._regions.append(TokenRegion(key, {name: self._modules[name] for name in found}, self._axis))

    def _tied(self, path: str, name: str, other: str) -> None:
        """Slice a module that shares its weight with a sliced one: an embedding, whose rows are those of a head."""
        part, cut = self._modules[path], self.cuts[name]
        if not isinstance(part, nn.Embedding) or cut.dim != 0 or path in self._taken:
            raise ValueError(
                f"{path} and {other} share the parameter {name!r}, but the plan slices its dim {cut.dim} only for "
                f"{other}; add an entry for {path!r} that slices it, too."
            )
        lookup: Any = part
        lookup.forward = _rows_of_vocabulary(part, part.forward, cut, self._axis)

    def _region_of(self, name: str) -> TokenRegion | None:
        return next((x for x in self._regions if x.has(name)), None)

    def _cut(self, name: str, param: Tensor, how: Slice, where: str, dim: int | None = None) -> Cut | None:
        """Note the cut of a parameter; return it."""
        dim = how.dim if dim is None else dim
        if dim is None:
            return None
        dim %= param.dim()
        above = self._modules.get(where.rpartition(".")[0])
        size = self._axis.size
        unit = size_of_head(above) if how.kind == "linear" else 1
        if unit > 1 and is_one_a_head(param.shape[dim], unit, self._features(where), self._groups(above)):
            unit = 1
        try:
            cut = equal(TENSOR, dim, param.shape[dim], size, how.parts, unit)
            heads = param.shape[dim] // (how.parts * unit)
            if unit > 1 and heads > size and heads % size:  # queries would meet keys of other heads
                raise ValueError(f"{size} ranks cannot divide {heads} heads equally")
            if len(set(cut.slices)) < size and (how.kind, how.output) != ("linear", "cut"):  # sums would count twice
                raise ValueError(f"there are fewer {'heads' if unit > 1 else f'entries in dim {dim}'} than ranks")
        except ValueError as error:
            raise ValueError(
                f"{where}: the plan cannot slice {name!r} over {self._axis.size} ranks along {TENSOR!r}: {error}."
            ) from None
        if self.cuts.setdefault(name, cut) != cut:
            raise ValueError(
                f"{where}: the plan slices dim {dim} of {name!r} here, but dim {self.cuts[name].dim} for another "
                "module."
            )
        return cut

    def _groups(self, attention: Any) -> int:
        return self._grouped.setdefault(id(attention), getattr(attention, "num_key_value_groups", 1))

    def _features(self, where: str) -> int:
        """Return the number of input features of a row-sliced layer next to this one; 0 without one."""
        owner, found = where.rpartition(".")[0], [0]
        for last, part in self._modules[owner].named_children():
            name, weight = f"{owner}.{last}" if owner else last, part._parameters.get("weight")
            words = [how for key, how in self._entries.items() if matches(key, name)]
            if weight is not None and any(how.kind == "linear" and how.output == "sum" for how in words):
                found.append(weight.shape[0 if is_transposed(part) else 1])
        return max(found)

    def _sharers(self, where: str, cut: Cut | None) -> Axis | None:
        """Return the ranks with the same slice as this rank; None if each rank has its own.

        With fewer key and value heads than ranks, several ranks hold the same one, which all queries of a rank
        then use.
        """
        size = self._axis.size
        num = size if cut is None else len(set(cut.slices))
        if num == size:
            return None
        above: Any = self._modules[where.rpartition(".")[0]]
        if id(above) not in self._regrouped and hasattr(above, "num_key_value_groups"):
            self._regrouped.add(id(above))
            above.num_key_value_groups = above.num_key_value_groups * num // size
        return self._mesh.block(TENSOR, size // num)

    def _module(self, name: str, part: nn.Module, how: Slice) -> None:
        transposed = is_transposed(part)
        weight, bias = part._parameters.get("weight"), part._parameters.get("bias")
        cut = None
        check_module(name, part, how, self._taken[name])
        if how.dim is not None and weight is not None:
            dim = how.dim
            if how.kind == "linear":
                how = of_matrix(name, how, weight.dim())
                dim = weight.dim() - 2 if how.dim == -2 else weight.dim() - 1
                dim = 1 - dim if transposed else dim
            cut = self._cut(self._name_of[name, "weight"], weight, how, name, dim)
            self._cut_in.setdefault(self._name_of[name, "weight"], set()).add(name)
            if transposed and how.dim == -2 and cut is not None:
                setattr(part, "nf", cut.length(self._axis.rank))  # noqa: B010  (its width, which it asks)
            if bias is not None and how.dim == -2:
                self._cut(self._name_of[name, "bias"], bias, how, name, 0)
        self._axis_maps(name, part, how, cut, bias is not None and how.dim == -1)

    def _axis_maps(self, name: str, part: nn.Module, how: Slice, cut: Cut | None, adds_bias: bool) -> None:
        forward, axis, region = part.forward, self._axis, self._region_of(name)
        sizes, self._words[name] = _sizes(cut), how
        if how.kind == "linear":
            part.forward = self._linear(name, part, how, cut, adds_bias)
        elif how.kind == "varied":
            self._with_varied_parameters.add(name)
            part.forward = with_varied_parameters(part, forward, axis, name)
        elif how.kind == "experts":
            if "forward" in vars(part):
                raise ValueError(
                    f"{name}: the forward of these experts was already replaced, for example by zerofn.moe.experts. "
                    "Call zerofn.parallel.tensor first."
                )
            part.forward = CutExperts(forward, axis, self.cuts, in_parts=region is not None)
        elif region is not None and (how.kind, how.output) != ("plain", "equal"):
            raise ValueError(
                f"{name}: plan[{self._taken[name]!r}] does not work inside layers that are 'sequence_parallel'. Leave "
                "one of the two out of the plan."
            )
        elif how.kind == "embedding" and how.dim == 0 and cut is not None:
            part.forward = _rows_of_vocabulary(part, forward, cut, axis)
        elif how.kind == "embedding" and how.output == "concat":
            part.forward = _before_and_behind(forward, None, lambda y: Linear.apply(Concat(axis, sizes), y)[0])
        elif how.kind == "identity":
            part.forward = _before_and_behind(forward, lambda x: x / axis.size, None)
        elif how.kind == "latent":
            part.forward = _before_and_behind(forward, None, self._latent(name))
        elif how.output == "sum":
            part.forward = _before_and_behind(forward, None, lambda y: Linear.apply(Psum(axis, of=name), y)[0])
        if how.kind != "experts":
            part.forward = self._trail.follow(name, part.forward, how, sizes)

    def _linear(
        self, name: str, part: nn.Module, how: Slice, cut: Cut | None, adds_bias: bool
    ) -> Callable[[Tensor], Tensor]:
        axis, region, owner = self._axis, self._region_of(name), name.rpartition(".")[0]
        sizes = _sizes(cut)
        if cut is not None and self._taken[name] not in self._of_family:
            self.owners.setdefault(owner, []).append(name)
        sharers = self._sharers(name, cut)
        forward = part.forward if sharers is None else with_varied_parameters(part, part.forward, sharers)
        if adds_bias:
            forward = _without_bias(part, forward)
        if region is not None:
            bias = (lambda: part._parameters["bias"]) if adds_bias else None
            return region.linear(name, self._modules[owner], forward, how, bias)
        if cut is not None and how.output == "cut" and part is self._head:
            give_loss_of_slices(self._modules[""], axis, cut.size)
        vary = self._varied.setdefault(owner, Varied(axis)) if how.input == "equal" else None
        return _linear(part, forward, how, axis, sizes, adds_bias, vary)

    def _latent(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return the map after the layer of latent attention (DeepSeek-V2) whose output is [keys and values, rotated
        keys]. The first part goes into a sliced layer, the second unchanged into every head.
        """
        size = getattr(self._modules[name.rpartition(".")[0]], "qk_rope_head_dim", None)
        if not isinstance(size, int):
            raise ValueError(
                f"{name}: the plan's word 'mla_kv_a_proj' works only for a layer of an attention module that has the "
                "attribute qk_rope_head_dim."
            )
        varied = VaryLast(self._axis, size, name)
        return lambda y: Linear.apply(varied, y)[0]


def _sizes(cut: Cut | None) -> tuple[int, ...]:
    """Return the sizes of all ranks' slices; nothing for what is whole."""
    return () if cut is None else tuple(map(cut.length, range(len(cut.slices))))


def _before_and_behind(
    forward: Callable[..., Any], before: Callable[[Tensor], Tensor] | None, behind: Callable[[Tensor], Tensor] | None
) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = forward(before(x) if before else x, *args, **kwargs)
        return behind(y) if behind else y

    return run


def _linear(
    part: nn.Module,
    forward: Callable[[Tensor], Tensor],
    how: Slice,
    axis: Axis,
    sizes: tuple[int, ...],
    adds_bias: bool,
    vary: Varied | None,
) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        if vary is not None:
            x = vary(x)
        elif how.input == "take":
            (x,) = Linear.apply(Take(axis, sizes), x)
        y = forward(x)
        draw_by_place((axis.rank, axis.name) if vary is not None and how.output == "cut" else None)
        if how.output == "sum":
            (y,) = Linear.apply(Psum(axis), y)
        elif how.output == "concat":
            (y,) = Linear.apply(Concat(axis, sizes), y)
        bias: Any = part._parameters["bias"] if adds_bias else None
        return y if bias is None else y + bias

    return run


def _without_bias(part: nn.Module, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the forward of a linear layer that adds no bias."""

    def run(x: Tensor) -> Tensor:
        bias: Any = part._parameters["bias"]
        none: Any = torch.zeros_like(bias) if is_transposed(part) else None
        part._parameters["bias"] = none
        try:
            return forward(x)
        finally:
            part._parameters["bias"] = bias

    return run


def _rows_of_vocabulary(
    part: nn.Module, forward: Callable[[Tensor], Tensor], cut: Cut, axis: Axis
) -> Callable[[Tensor], Tensor]:
    """Return an embedding's forward that looks up the rows which are here, and zeros for all others."""
    ((start, stop),) = cut.slices[axis.rank]
    padding: Any = getattr(part, "padding_idx", None)
    if padding is not None:  # a row without a gradient
        setattr(part, "padding_idx", padding - start if start <= padding < stop else None)  # noqa: B010

    def run(ids: Tensor) -> Tensor:
        there = (ids >= start) & (ids < stop)
        rows = forward(torch.where(there, ids - start, 0))
        return Linear.apply(Psum(axis), rows * there.unsqueeze(-1).to(rows.dtype))[0]

    return run
