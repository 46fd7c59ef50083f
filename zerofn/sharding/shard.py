"""`shard` and `unshard`: a state in, the same state cut over the ranks out, and back."""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import tree
from ..comm.agreement import agree_on
from ..comm.mesh import DATA, Axis, Mesh
from ..deferred_init import record
from ..dry_run.fake_machine import Imagined, imagining
from ..dry_run.script import rehearsing
from ..memory.host_allocator import map_large_blocks
from ..offload.disk import Store
from ..offload.policy import Offload, check_memory, of_units
from ..offload.policy import resolve as resolve_offload
from ..util.errors import nearest
from ..util.patches import uncollected
from .allocate import Filler, allocate, equalize, scratch_for, settle
from .codecs import PLAIN, SIGNED, SPLIT, UNSIGNED, Away, Kind
from .gather_scatter import gather_leaves
from .layout import Layout, LeafInfo, make_layout
from .precision import Precision, resolve
from .sharded import Sharded, Spec, check_whole, is_sharded
from .state_entries import adapted, device_of, is_state, params_of
from .state_tree import layout_like, signature_of, sublayouts

log = logging.getLogger("zerofn")
STAGES = (0, 1, 2, 3)
_ON_HOST = ("step", "rng")  # of a TrainState: they seed host-side draws, and would otherwise cost a device sync


def shard(
    state_or_init: Any,
    stage: Any = 3,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    precision: Precision | str | None = None,
    offload: Offload | str | None = None,
    unit: Callable[[str], str] | None = None,
    device: torch.device | str | None = None,
    plan: Any = None,
) -> Any:
    """A state with its partitioned parts as `Sharded`: 1/N of everything on each rank.

    `state_or_init`: a pytree, or a zero-argument function that returns one. A function is replayed leaf by
    leaf, so that no rank ever holds more full parameters than one unit, bit-equal to calling it with the same
    seed. In a plain pytree the entry named `params` holds the parameters; every other subtree with their
    structure and shapes is cut the same way; the rest is replicated, the first rank's on all, ints and floats as 0-d
    tensors.
    The result never aliases the input. `stage`: 0 replicates; 1 and 2 cut the optimizer's state; 3 cuts the
    parameters too. `precision`: None, "fp32", "bf16", "fp16" or a `Precision`. `unit`: leaf name -> unit name.
    `device`: where pieces live; where the parameters are by default. `offload`: None, "cpu", "nvme" or an `Offload`
    keeps the optimizer's state, the parameters or both in host memory or on drives. `stage="auto"` with `plan`, what
    `zerofn.plan` returned, takes the stage, precision and offload that it recommends.

    Raises `ValueError`/`TypeError` for a state without `params`, a leaf that is no tensor or number, an unknown
    option; `MemoryError` for a plan in which nothing fits; `RuntimeError` on every rank when ranks disagree about the
    layout. Nothing is allocated before.
    """
    if stage == "auto" or plan is not None:
        stage, precision, offload = _planned(stage, precision, offload, plan, Mesh.of(mesh).axis().size)
    where = Mesh.of(mesh)
    if (rehearsal := rehearsing()) is not None:
        with Imagined(False, 1.0, 1.0)():
            first = initial(state_or_init, resolve(precision))
            state = imagine(first, stage, Mesh((Axis(DATA, 1),)), precision, None, unit)
        rehearsal.shards(state, state_or_init, {"precision": precision, "unit": unit})
        return state
    map_large_blocks()
    options, values, parts, treedef = agree_on(
        "zerofn.shard", lambda: _plan(state_or_init, _Options(stage, where, precision, unit, device, offload))
    )
    scratch = (
        agree_on(
            "zerofn.shard",
            lambda: (  # a rank whose drive is full is not waited for
                scratch_for((p.spec, p.kinds) for p in parts if isinstance(p, _Cut)),
                "",
            ),
        )
        if options.offload.on_disk
        else None
    )
    return options.place(values, parts, treedef, scratch)


def check_stage(stage: Any) -> None:
    """Raise `ValueError` for a stage that is not there."""
    if stage not in STAGES or isinstance(stage, bool):
        near = nearest(stage, STAGES, 1, 0.0)
        raise ValueError(
            f"stage={stage!r} is not known: stages are 0 (replicated), 1, 2 and 3"
            f"{f'; did you mean {near[0]}?' if near else '.'}"
        )


def _planned(stage: Any, precision: Any, offload: Any, plan: Any, num_ranks: int) -> tuple[int, Any, Any]:
    """(stage, precision, offload) of a plan's recommended row."""
    if stage != "auto" or not hasattr(plan, "options"):
        raise ValueError(
            "shard: stage='auto' and plan= go together: table = zerofn.plan(train_step, init_state, "
            "batch, world=..., machine=...), then shard(init_state, stage='auto', plan=table)."
        )
    if precision is not None or offload is not None:
        raise ValueError(
            "shard(stage='auto') takes precision and offload from the plan; leave them out, or give them "
            "to zerofn.plan."
        )
    if plan.world != num_ranks:
        raise ValueError(
            f"shard: the plan is for {plan.world} rank(s), and there are {num_ranks}; write "
            f"zerofn.plan(..., world={num_ranks})."
        )
    options = plan.options()
    log.info("shard(stage='auto'): %s", plan.best.config.call())
    return options["stage"], options.get("precision"), options.get("offload")


def initial(state_or_init: Any, precision: Precision) -> Any:
    """The whole state that is to be sharded; without memory, if a function makes it."""
    return _initial(state_or_init, precision)[0]


def imagine(
    state: Any,
    stage: int,
    mesh: Mesh,
    precision: Precision | str | None,
    offload: Offload | str | None,
    unit: Callable[[str], str] | None,
) -> Any:
    """The state, as `initial` gives it, as rank 0 of an imagined machine would hold it: the same layout, tensors
    without memory."""
    machine = imagining()
    assert machine is not None
    options, parts, treedef = _laid_out(state, _Options(stage, mesh, precision, unit, None, offload).checked())
    scratch = scratch_for((p.spec, p.kinds) for p in parts if isinstance(p, _Cut))
    return tree.unflatten(
        treedef, [options._allocate(p, scratch) if isinstance(p, _Cut) else machine.like(p.value) for p in parts]
    )


def _plan(state_or_init: Any, given: _Options) -> tuple[Any, str]:
    """Everything that can be wrong is found here, before anything is allocated or sent."""
    options = given.checked()
    precision = resolve(options.precision)
    state, values = _initial(state_or_init, precision)
    options, parts, treedef = _laid_out(state, options)
    if given.offload is not None:
        _check_offload(options.offload, [p for p in parts if isinstance(p, _Cut)], options.home)
    return (options, values, parts, treedef), _description(options.stage, precision, parts)


def _initial(state_or_init: Any, precision: Precision) -> tuple[Any, Iterator[tuple[int, Any]]]:
    """The state, and its leaves' numbers and values in the order in which they come to be."""
    if callable(state_or_init) and not isinstance(state_or_init, torch.nn.Module):
        with uncollected():
            recorded = record(lambda: adapted(state_or_init(), precision), tree.flatten)
        return recorded.output, recorded.run()
    state = adapted(state_or_init, precision)
    return state, enumerate(tree.leaves(state))


def _laid_out(state: Any, options: _Options) -> tuple[_Options, list[Any], Any]:
    """Options with what follows from the state, its parts, and its structure."""
    home, size = options.device or device_of(state), options.mesh.axis().size
    options = replace(options, home=home, offload=resolve_offload(options.offload, options.stage, size, home))
    return (options, *options.parts(state))


def _check_offload(offload: Offload, cuts: list[_Cut], home: torch.device) -> None:
    if not any(kind.away for cut in cuts for kind in cut.kinds):
        raise ValueError(
            f"{offload} has no effect: the optimizer keeps nothing per parameter. Leave it out, or "
            "offload the parameters: Offload(params=...)."
        )
    kept: Counter[str] = Counter()
    for cut in cuts:
        for unit, kind in zip(cut.spec.layout.units, cut.kinds, strict=True):
            for k, (dtype, size, tier) in enumerate(kind.parts(unit.size // cut.spec.num_pieces)):
                what = "parameters" if cut.is_params and k == 0 else "optimizer"
                kept[f"{what} on {tier or home.type}"] += size * dtype.itemsize
    check_memory(offload, kept, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def unshard(state: Any, rank: int | None = None) -> Any:
    """The full state again, every `Sharded` as the tree it stands for, in the stored dtype.

    On every rank; with `rank` on that rank alone, and None in place of each `Sharded` on the others. All ranks
    must call it. At most one unit more than the result is held at a time. Raises `ValueError` for a rank that is not
    there, on every rank and before anything is sent.
    """
    check_whole(state, "unshard")
    for x in tree.leaves(state, is_leaf=is_sharded):
        if rank is not None and is_sharded(x) and rank not in range(x.spec.axis.size):
            raise ValueError(
                f"unshard: rank={rank!r} is not there; the state lies on {x.spec.axis.size} rank(s), "
                "numbered from 0. Leave rank out to have it on all of them."
            )

    def full(x: Any) -> Any:
        if not is_sharded(x):
            return x.clone() if isinstance(x, Tensor) else x
        axis = x.spec.axis
        spec = Spec(x.layout, axis, x.spec.stage, Precision())
        leaves: list[Any] = [None] * len(x.layout.where)
        for i, unit in enumerate(x.layout.units):
            one = Sharded(Spec(_single(x.layout, i), axis, spec.stage, Precision()), [x.stored[i].loaded()])
            for leaf, value in zip(unit.leaves, gather_leaves(one), strict=True):
                leaves[leaf.index] = value.clone() if rank in (None, axis.rank) else None
        return tree.unflatten(x.layout.treedef, leaves) if rank in (None, axis.rank) else None

    with torch.no_grad():
        return tree.tree_map(full, state, is_leaf=is_sharded)


def _single(layout: Layout, index: int) -> Layout:
    """The layout of one unit, its leaves numbered in its own order."""
    unit = layout.units[index]
    leaves = tuple(type(x)(x.name, x.shape, k, x.offset, x.dtype) for k, x in enumerate(unit.leaves))
    own = type(unit)(unit.name, leaves, unit.size, unit.trainable, unit.dtype)
    return Layout((own,), tree.structure(list(range(len(leaves)))), layout.axis, layout.num_shards)


@dataclass(frozen=True)
class _Cut:
    """A subtree to become `Sharded`; its leaves are the state's leaves first, first + 1, ..."""

    name: str
    spec: Spec
    first: int
    device: torch.device | None
    kinds: list[Kind]  # of the pieces
    is_params: bool


@dataclass(frozen=True)
class _Copy:
    """A leaf to be replicated."""

    first: int
    value: Tensor
    on_host: bool


@dataclass(frozen=True)
class _Options:
    stage: int
    mesh: Mesh
    precision: Any  # a name or None until `checked`
    unit: Callable[[str], str] | None
    device: Any
    offload: Any = None  # as given until it is resolved
    home: Any = None  # where the model computes

    def checked(self) -> _Options:
        """The same with precision and device resolved; raises for what is unknown."""
        check_stage(self.stage)
        return replace(self, precision=resolve(self.precision), device=self._numbered())

    def _numbered(self) -> torch.device | None:
        """The device with its number. Raises `ValueError` for one that is not there."""
        try:
            return None if self.device is None else torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"shard: device={self.device!r} cannot be had: {error}") from None

    def place(
        self,
        values: Iterable[tuple[int, Tensor]],
        parts: list[_Cut | _Copy],
        treedef: tree.PyTreeSpec,
        scratch: Store | None,
    ) -> Any:
        """Allocate every part, and take the values as they come."""
        made: list[Any] = [self._allocate(p, scratch) if isinstance(p, _Cut) else None for p in parts]
        into: dict[int, Callable[[Tensor], Any]] = {}
        out: list[Any] = list(made)
        for k, part in enumerate(parts):
            if isinstance(part, _Copy):  # a number that lies on the host would be mixed with the device's
                there = self.device or (None if part.value.dim() else self.home)
                into[part.first] = _keeper(out, k, None if part.on_host else there)
            else:
                filler = Filler(made[k])
                for leaf in part.spec.layout.leaves:
                    into[part.first + leaf.index] = _filler(made[k], filler, leaf)
        with torch.no_grad():
            for index, value in values:
                into[index](value)
            for part, sharded in zip(parts, made, strict=True):
                if isinstance(part, _Cut):
                    settle(sharded)
            equalize([out[k] for k, part in enumerate(parts) if isinstance(part, _Copy)], self.mesh.axis())
        return tree.unflatten(treedef, out)

    def parts(self, state: Any) -> tuple[list[_Cut | _Copy], tree.PyTreeSpec]:
        """What becomes of every subtree, in the state's order."""
        layouts: list[tuple[Layout, bool]] = []
        states = [x for x in tree.leaves(state, is_leaf=is_state) if is_state(x)]
        for x in states:
            layout = self._layout(x)
            layouts.append((layout, True))
        known = {}
        masters = {x.dtype for s in states for x in tree.leaves(params_of(s)) if x.is_floating_point()}
        for layout, _ in layouts:
            known.update({signature_of(part): part for part in sublayouts(layout, self._spec(layout))})
        owners = {id(params_of(x)) for x in states}

        def layout_of(x: Any) -> Layout | None:
            return None if isinstance(x, Tensor) else layout_like(x, known)

        formats = _formats(state)
        nodes, treedef = tree.flatten(state, is_leaf=lambda x: layout_of(x) is not None)
        parts: list[_Cut | _Copy] = []
        first = 0
        for name, node in zip(tree.field_names(treedef), nodes, strict=True):
            like, last = layout_of(node), name.rpartition(".")[2]
            if like is None:
                parts.append(_Copy(first, node, last in _ON_HOST))
                first += 1
            else:
                is_params = id(node) in owners and last == "params"
                leaves = tree.leaves(node)
                dtypes = [self._dtype([leaves[x.index].dtype for x in u.leaves], masters) for u in like.units]
                kinds = [self._kind(name, dtype, is_params, formats.get(id(node))) for dtype in dtypes]
                kinds = self._offloaded(like, kinds, is_params)
                spec = replace(self._spec(like), halves=is_params)
                parts.append(_Cut(name, spec, first, leaves[0].device if leaves else None, kinds, is_params))
                first += len(leaves)
        return parts, treedef

    def _layout(self, state: Any) -> Layout:
        params = params_of(state)
        leaves = tree.leaves(params)
        if not leaves or isinstance(params, Tensor):
            raise ValueError(
                "shard: 'params' must be a container with at least one tensor, such as "
                f"dict(model.named_parameters()); got {type(params).__name__}."
            )
        frozen, label = getattr(state, "frozen", None), getattr(getattr(state, "tx", None), "label", None)
        return make_layout(
            params,
            self.mesh.axis().size,
            axis=self.mesh.axis().name,
            unit=self.unit,
            dtype=self.precision.param,
            trainable=(lambda name: not frozen(name)) if frozen else lambda name: True,
            label=(lambda name, leaf: label(LeafInfo(name, tuple(leaf.shape), leaf.dtype))) if label else lambda *_: (),
        )

    def _spec(self, layout: Layout) -> Spec:
        return Spec(layout, self.mesh.axis(), self.stage, self.precision)

    def _dtype(self, dtypes: list[torch.dtype], masters: set[torch.dtype]) -> torch.dtype:
        """The dtype of a piece: the master's for what has a dtype that parameters had, else its own."""
        own = functools.reduce(torch.promote_types, dtypes)
        return self.precision.param if self.precision.param is not None and own in masters else own

    def _kind(self, name: str, dtype: torch.dtype, is_params: bool, how: str | None) -> Kind:
        if how == "bf16":
            return Kind(PLAIN, torch.bfloat16)
        if how is not None and dtype != torch.float32:
            raise ValueError(
                f"shard: {name!r} is to be kept in 8-bit blocks, which hold float32, and the parameters "
                f"are {str(dtype).removeprefix('torch.')}; write precision='fp32', or leave moments out."
            )
        if how is not None:
            return Kind(SIGNED if how == "signed" else UNSIGNED, dtype)
        return Kind(SPLIT if is_params and self.precision.splits(dtype) else PLAIN, dtype)

    def _offloaded(self, layout: Layout, kinds: list[Kind], is_params: bool) -> list[Kind]:
        """The same with where each unit is to lie."""
        out = []
        for kind, offload in zip(kinds, of_units(self.offload, [u.size for u in layout.units]), strict=True):
            first = offload.params if is_params else offload.optimizer
            tiers = (first, *[offload.optimizer] * (kind.num_parts - 1))
            paths = tuple(offload.paths) if "nvme" in tiers else ()
            out.append(replace(kind, away=Away(tiers, paths, str(self.home), offload.update)) if any(tiers) else kind)
        return out

    def _allocate(self, cut: _Cut, scratch: Store | None) -> Sharded:
        device = self.device or cut.device
        device = torch.device("cpu") if device is None or device.type == "meta" else device
        cached = cut.is_params and self.stage in (1, 2) and cut.spec.axis.size > 1
        return allocate(cut.spec, device, cached, cut.kinds, scratch, cut.name)


def _formats(state: Any) -> dict[int, str]:
    """How subtrees of optimizer states whose types say so are kept, by id."""
    found = tree.leaves(state, is_leaf=lambda x: hasattr(type(x), "kept"))
    return {id(getattr(x, name)): how for x in found for name, how in getattr(type(x), "kept", {}).items()}


def _description(stage: int, precision: Precision, parts: list[_Cut | _Copy]) -> str:
    """What ranks must agree about, a line each, so that a difference can be shown."""
    lines = [f"stage {stage}, {precision}"]
    for part in parts:
        if isinstance(part, _Copy):
            lines.append(f"replicated {tuple(part.value.shape)} {part.value.dtype}")
        else:
            lines += [
                f"{leaf.name} {list(leaf.shape)} {leaf.dtype} in unit {u.name!r}, kept {kind.described}"
                for u, kind in zip(part.spec.layout.units, part.kinds, strict=True)
                for leaf in u.leaves
            ]
    return "\n".join(lines)


def _keeper(out: list[Any], k: int, device: torch.device | None) -> Callable[[Tensor], None]:
    def keep(value: Tensor) -> None:
        out[k] = value.detach().to(device or value.device, copy=True)

    return keep


def _filler(sharded: Sharded, filler: Filler, leaf: Any) -> Callable[[Tensor], None]:
    index, found = sharded.layout.where[leaf.name]
    unit = sharded.layout.units[index]
    start, stop = sharded.spec.bounds(unit)
    a, b = max(found.offset, start), min(found.stop, stop)

    def fill(value: Tensor) -> None:
        if a < b:
            values = value.detach().reshape(-1)[a - found.offset : b - found.offset]
            filler.write(index, a - start, values)

    return fill
