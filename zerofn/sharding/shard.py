"""`shard` and `unshard`: a state in, the same state cut over the ranks out, and back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import tree
from .._torch_compat import current_trace
from ..comm.axes import RANKS, USUAL
from ..comm.known_meshes import Meshes
from ..comm.mesh import Axis, Mesh
from ..deferred_init import Replay, record
from ..dry_run.fake_machine import FakeMachine, fake_machine
from ..dry_run.script import current_dry_run
from ..geometry.cuts import Cut, sliced
from ..geometry.layout import Unit
from ..job.agreement import agree_on
from ..memory.host_allocator import map_large_blocks
from ..memory.turns import outside_steps
from ..offload.disk import Store
from ..offload.policy import Offload, Tier
from ..util.arguments import checked
from ..util.patches import uncollected
from ..util.process import the
from ..util.sizes import counted
from .allocate import Filler, allocate, scratch_for, settle
from .first_rank import as_on_first, check_equal, lines_of_values, on_device, on_host, values_on_first
from .partition import Partition, Stage
from .precision import Precision, PrecisionWord, resolve
from .rank_entries import own_entry
from .shard_plan import ReplicatedPart, ShardedPart, check_feedback, check_offload, description, plan_state
from .sharded import Sharded, check_whole, is_sharded
from .state_tree import adapted, device_of
from .transfers import equalize, of_first, whole_leaves
from .wire import Wire, WireWord, word_of

log = logging.getLogger("zerofn")
T = TypeVar("T")


@overload
def shard(
    state_or_init: Callable[[], T],
    stage: Stage | Literal["auto"] = 3,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    precision: Precision | PrecisionWord | None = None,
    offload: Offload | Tier | None = None,
    unit: Callable[[str], str] | None = None,
    device: torch.device | str | None = None,
    plan: Any = None,
    cuts: Mapping[str, Cut | Sequence[Cut]] | None = None,
    hpz: bool = False,
    wire: WireWord | Wire | Mapping[str, WireWord | Wire | None] | None = None,
) -> T: ...
@overload
def shard(
    state_or_init: T,
    stage: Stage | Literal["auto"] = 3,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    precision: Precision | PrecisionWord | None = None,
    offload: Offload | Tier | None = None,
    unit: Callable[[str], str] | None = None,
    device: torch.device | str | None = None,
    plan: Any = None,
    cuts: Mapping[str, Cut | Sequence[Cut]] | None = None,
    hpz: bool = False,
    wire: WireWord | Wire | Mapping[str, WireWord | Wire | None] | None = None,
) -> T: ...
@checked("unit", "cuts")
@outside_steps("zerofn.shard")
def shard(
    state_or_init: Any,
    stage: Stage | Literal["auto"] = 3,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    precision: Precision | PrecisionWord | None = None,
    offload: Offload | Tier | None = None,
    unit: Callable[[str], str] | None = None,
    device: torch.device | str | None = None,
    plan: Any = None,
    cuts: Mapping[str, Cut | Sequence[Cut]] | None = None,
    hpz: bool = False,
    wire: WireWord | Wire | Mapping[str, WireWord | Wire | None] | None = None,
) -> Any:
    """Return a state whose partitioned parts are `Sharded`: each rank holds 1/N of them.

    `state_or_init`: a pytree, or a function without arguments that returns one. A function is replayed leaf by leaf, so
    no rank ever holds more full parameters than one unit; the result has the same bits as a plain call with the same
    seed. The first rank's seed is used on every rank: while the function runs, the global generators of torch, Python
    and NumPy have the first rank's states. Afterwards, a generator whose state differed from the first rank's gets its
    own state back; the others have advanced, as after a plain call.

    The entry named `params` holds the parameters. Every other subtree with the same structure and shapes is sharded in
    the same way. All other leaves are replicated; ints and floats become 0-d tensors. If the values of a pytree differ
    between ranks, all ranks use the first rank's, with a warning. Shards are stored in row-major order: gathered
    parameters are contiguous, even if they had another memory format (`channels_last`). The result never aliases the
    input.

    - `stage`: 0 replicates; 1 shards the optimizer's state; 2 gradients too; 3 parameters too. "auto" uses the stage,
      precision, offload, hpz and wire that `plan`, a table from `zerofn.plan`, recommends.
    - `mesh`: the ranks and their axes, such as `zerofn.Mesh.make(replicate=2, data=-1)`; by default all ranks along
      `data`. Units are sharded over `data`, and all ranks along `replicate` have the same shards, so gathers use only
      the links along `data` (hybrid sharding).
    - `precision`: None, "fp32", "bf16", "fp16", "fp8" or a `Precision`.
    - `offload`: None, "cpu", "nvme" or an `Offload`: optimizer state or parameters in host memory or on drives.
    - `unit`: leaf name -> unit name; the leaves of a unit, usually a layer, are gathered together.
    - `device`: where shards are stored; by default the parameters' device.
    - `cuts`: leaf name -> how it is cut into slices, or its pipeline stage, as `parallel` and `moe` return them.
    - `hpz`: at stage 3, also shard parameters and optimizer state over `replicate` (ZeRO++'s hpZ). Each rank then also
      stores a copy, in the compute dtype, of its shard along `data`. Units are gathered from these copies, so gathers
      use only the links along `data`, although the state is sharded over all ranks.
    - `wire`: the codec for parameters and gradients that ranks send: "bf16", "fp8", "int8", a `Wire`, or a dict from
      axis to these, `{"replicate": "int8"}`. Master parameters stay exact.

    Raises `ValueError` or `TypeError` for a state without `params`, a leaf that is not a tensor or number, or an
    unknown option; `MemoryError` for a plan in which nothing fits; `RuntimeError` on every rank if the layout differs
    between ranks, or if the function computes different values on different ranks, because it reads different numbers,
    files or seeds. Nothing is allocated before these checks.

    >>> shard(lambda: {"params": {"w": torch.ones(2)}}, stage=3)["params"].shards  # padded to 2,048
    (tensor([1., 1., 0.,  ..., 0., 0., 0.]),)
    """
    asked: dict[str, Any] = {"stage": stage, "precision": precision, "offload": offload, "hpz": hpz, "wire": wire}
    by_plan = stage == "auto" or plan is not None
    asked = {**(_of_plan(plan, asked, Mesh.of(mesh)) if by_plan else asked), "cuts": cuts}
    where: Mesh = the(Meshes).know(Mesh.of(mesh))
    if current_dry_run() is not None:
        return _shard_dry(state_or_init, where, asked, unit)
    planning = partial(_plan, state_or_init, lambda: Partition.zero(where, **asked), unit, device)
    return _shard(state_or_init, where, planning)


def _shard(state_or_init: Any, where: Mesh, planning: Callable[[], tuple[_Plan, str]]) -> Any:
    """Agree with the other ranks about the plan, and carry it out."""
    map_large_blocks()
    with contextlib.ExitStack() as alike:
        if _is_function(state_or_init):
            alike.enter_context(as_on_first(where, on_host()))
        planned = agree_on("zerofn.shard", planning)
        given = planned.given
        if isinstance(given, Replay):
            check_equal(where, planned.lines)
            alike.enter_context(as_on_first(where, on_device()))
            values = given.run()
        else:
            values = values_on_first(where, given, planned.lines, planned.partition.home)
        return _place(planned, values, _scratch_of_all(planned))


class _Plan(NamedTuple):
    """What becomes of a state. `given`: its leaves, or the replay that makes them; `lines`: what of these must be equal
    on all ranks. `device`: where shards are stored, None for where the parameters are.
    """

    partition: Partition
    device: torch.device | None
    given: Any
    lines: list[str]
    parts: list[ShardedPart | ReplicatedPart]
    treedef: tree.PyTreeSpec

    @property
    def cut(self) -> list[ShardedPart]:
        """The subtrees that become `Sharded`."""
        return [x for x in self.parts if isinstance(x, ShardedPart)]


def _shard_dry(state_or_init: Any, where: Mesh, asked: dict[str, Any], unit: Any) -> Any:
    """Return the state of a dry run, in which a script comes to its first step."""
    dry_run = current_dry_run()
    assert dry_run is not None
    precision, given = resolve(asked["precision"], asked["wire"]), asked["precision"]
    if isinstance(given, Precision):
        given = replace(given, wire=None)
    with FakeMachine(False, 1.0, 1.0)():
        first = initial(state_or_init, precision)
        grid = Mesh((Axis(USUAL, 1),)) if where.ranks else where
        here = {**asked, "offload": None, "hpz": asked["hpz"] and grid.num_ranks > 1}  # the script itself may be alone
        state = shard_fake(first, Partition.zero(grid, **here), unit)
    chosen = {"mesh": None if where.ranks else where, "cuts": asked["cuts"], "again": asked["hpz"]}
    dry_run.shards(state, state_or_init, {"precision": given, "wire": word_of(precision.wire), "unit": unit, **chosen})
    return state


def _scratch_of_all(planned: _Plan) -> Store | None:
    """Return the space on drives; None if none is needed. The other ranks do not wait for one whose drive is full."""
    if not planned.partition.tier.on_disk:
        return None
    return agree_on("zerofn.shard", lambda: (scratch_for((p.spec, p.storages) for p in planned.cut), ""))


def _of_plan(plan: Any, asked: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return what a plan's recommended row asks for."""
    if asked["stage"] != "auto" or not hasattr(plan, "options"):
        raise ValueError(
            "shard: stage='auto' needs plan=, and plan= needs stage='auto'. Write table = zerofn.plan(train_step, "
            "init_state, batch, world=..., machine=...), then shard(init_state, stage='auto', plan=table)."
        )
    if any(asked[name] is not None for name in ("precision", "offload", "wire")) or asked["hpz"]:
        raise ValueError(
            "shard(stage='auto') reads precision, offload, hpz and wire from the plan. Leave them out here, or pass "
            "them to zerofn.plan."
        )
    if plan.world != mesh.num_ranks:
        raise ValueError(
            f"shard: the plan is for {counted(plan.world, 'rank')}, but this job has {mesh.num_ranks}. Write "
            f"zerofn.plan(..., world={mesh.num_ranks})."
        )
    options, wanted = plan.options(), plan.best.config.sizes
    found = [(x.kind.name, x.size) for x in mesh.axes if x.size > 1]
    if [x for x in wanted.items() if x[1] > 1] != found:
        raise ValueError(
            f"shard: the plan recommends a different mesh from {mesh}. Write "
            f"mesh=zerofn.Mesh.make({', '.join(f'{name}={size}' for name, size in wanted.items())})."
        )
    log.info("shard(stage='auto'): %s", plan.best.config.call())
    return {**asked, **options}


def initial(state_or_init: Any, precision: Precision) -> Any:
    """Return the whole state to be sharded; without memory if a function makes it."""
    return _initial(state_or_init, precision)[0]


def shard_fake(state: Any, partition: Partition, unit: Callable[[str], str] | None) -> Any:
    """Return the state, from `initial`, as rank 0 of a fake machine would hold it: the same layout, tensors without
    memory.
    """
    machine = fake_machine()
    assert machine is not None
    partition = partition.at(device_of(state))
    planned = _Plan(partition, None, state, [], *plan_state(state, partition, unit))
    scratch = scratch_for((p.spec, p.storages) for p in planned.cut)
    made = [
        _allocate(planned, p, scratch) if isinstance(p, ShardedPart) else machine.like(p.value) for p in planned.parts
    ]
    return tree.unflatten(planned.treedef, made)


@uncollected()
def _plan(state_or_init: Any, describe: Callable[[], Partition], unit: Any, device: Any) -> tuple[_Plan, str]:
    """Find every error before anything is allocated or sent. Returns the plan, and a description."""
    partition, device = describe(), _numbered(device)
    state, replay = _initial(state_or_init, partition.precision)
    partition = partition.at(device or device_of(state))
    planned = _Plan(partition, device, replay or tree.leaves(state), [], *plan_state(state, partition, unit))
    check_offload(partition, planned.cut)
    check_feedback(planned.cut)
    if partition.mesh.num_ranks > 1:
        names = tree.field_names(tree.structure(state))
        planned.lines.extend(replay.lines(names) if replay else lines_of_values(names, planned.given))
    return planned, description(partition, planned.parts)


def _numbered(device: Any) -> torch.device | None:
    """Return the device with its index. Raises `ValueError` if it does not exist."""
    try:
        return None if device is None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"shard: device={device!r} is not available: {error}") from None


def _is_function(state_or_init: Any) -> bool:
    return callable(state_or_init) and not isinstance(state_or_init, torch.nn.Module)


def _initial(state_or_init: Any, precision: Precision) -> tuple[Any, Replay | None]:
    """Return the state; without memory if a function makes it, which the replay does then."""
    if not _is_function(state_or_init):
        return adapted(state_or_init, precision), None
    with uncollected():
        replay = record(lambda: adapted(state_or_init(), precision), tree.flatten)
    return replay.output, replay


@overload
def unshard(state: Sharded, rank: int | None = None, *, only: Callable[[str], bool] | None = None) -> Any: ...
@overload
def unshard(state: T, rank: int | None = None, *, only: Callable[[str], bool] | None = None) -> T: ...
@checked("rank", "only")
@outside_steps("zerofn.unshard", capturable=True)
def unshard(state: Any, rank: int | None = None, *, only: Callable[[str], bool] | None = None) -> Any:
    """Return the full state: every `Sharded` becomes a plain tree, in the stored dtype.

    Every rank gets the result. With `rank`, only the rank with this number gets it, and all others get None for each
    `Sharded`. `only`: a predicate of leaf names; units without a selected leaf are not gathered, and their leaves are
    None. All ranks must call it. In addition to the result, at most one unit is in memory; for a unit whose leaves are
    sliced over `tensor` or `expert`, up to three times the size of its slices. Raises `ValueError`, on every rank and
    before anything is sent, if `rank` does not exist.

    >>> state = shard({"params": {"w": torch.ones(2)}}, stage=3)
    >>> unshard(state)
    {'params': {'w': tensor([1., 1.])}}
    """
    check_whole(state, "unshard")
    found = [x.spec.mesh for x in tree.leaves(state, is_leaf=is_sharded) if is_sharded(x)]
    mesh = max(found, key=lambda mesh: mesh.num_ranks, default=None)  # what replicas have of their own is on fewer
    if rank is not None and mesh is not None and rank not in range(mesh.num_ranks):
        raise ValueError(
            f"unshard: rank={rank!r} does not exist; the state is on {counted(mesh.num_ranks, 'rank')}, numbered from "
            "0. Leave rank out to get the result on all ranks."
        )

    if current_trace() is None:  # transfers would wait in silence for a rank that does not come
        agree_on("zerofn.unshard", lambda: (None, "" if only is None else _units_with(state, only)))

    def full(x: Any) -> Any:
        if not is_sharded(x):
            return x.clone() if isinstance(x, Tensor) else x
        here = rank is None or mesh is None or rank == mesh.all.rank
        leaves: list[Any] = [None] * len(x.layout.where)
        for i, unit in enumerate(x.layout.units):
            if only is not None and not _has(unit, only):
                continue
            found = whole_leaves(x.spec, unit, x.stored[i].loaded().decode())
            for leaf, whole in zip(unit.leaves, found if here else (), strict=here):
                leaves[leaf.index] = whole if leaf.cuts else whole.clone()
        return tree.unflatten(x.layout.treedef, leaves) if here else None

    with torch.no_grad():
        return tree.tree_map(full, state, is_leaf=is_sharded)


def _has(unit: Unit, only: Callable[[str], bool]) -> bool:
    return any(only(leaf.name) for leaf in unit.leaves)


def _units_with(state: Any, only: Callable[[str], bool]) -> str:
    """Return the names of the units to gather."""
    cut = [x for x in tree.leaves(state, is_leaf=is_sharded) if is_sharded(x)]
    return "units " + ", ".join(unit.name for x in cut for unit in x.layout.units if _has(unit, only))


def _place(planned: _Plan, values: Iterable[tuple[int, Tensor]], scratch: Store | None) -> Any:
    """Allocate every part, and write values as they come."""
    home, parts = planned.partition.home, planned.parts
    made: list[Any] = [_allocate(planned, p, scratch) if isinstance(p, ShardedPart) else None for p in parts]
    into: dict[int, Callable[[Tensor], Any]] = {}
    out: list[Any] = list(made)
    for k, part in enumerate(parts):
        if isinstance(part, ReplicatedPart):  # a number on the host would be mixed with numbers on the device
            there = planned.device or (None if part.value.dim() else home)
            into[part.first] = _keeper(out, k, None if part.on_host else there)
        else:
            filler = Filler(made[k])
            for leaf in part.spec.layout.leaves:
                into[part.first + leaf.index] = _filler(made[k], filler, leaf)
    with torch.no_grad(), uncollected():
        for index, value in values:
            into[index](value)
        for part, sharded in zip(parts, made, strict=True):
            if isinstance(part, ShardedPart):
                settle(sharded)
        replicated = [out[k] for k, part in enumerate(parts) if isinstance(part, ReplicatedPart)]
        equalize(replicated, planned.partition.mesh.all)
    return tree.unflatten(planned.treedef, out)


def _allocate(planned: _Plan, part: ShardedPart, scratch: Store | None) -> Sharded:
    device = planned.device or part.device
    device = torch.device("cpu") if device is None or device.type == "meta" else device
    cached = part.is_params and part.spec.has_copies
    return allocate(part.spec, part.storages, device, cached=cached, scratch=scratch, name=part.name)


def _keeper(out: list[Any], k: int, device: torch.device | None) -> Callable[[Tensor], None]:
    def keep(value: Tensor) -> None:
        out[k] = value.detach().to(device or value.device, copy=True)

    return keep


def _filler(sharded: Sharded, filler: Filler, leaf: Any) -> Callable[[Tensor], None]:
    index, found = sharded.layout.where[leaf.name]
    unit = sharded.layout.units[index]
    start, stop = sharded.spec.bounds(unit)
    a, b = max(found.offset, start), min(found.stop, stop)
    mesh, cuts, of_ranks = sharded.spec.mesh, found.cuts, sharded.spec.of_ranks
    others = [cut for cut in cuts if cut.axis != RANKS]

    def fill(value: Tensor) -> None:
        value = own_entry(value, mesh.axis(RANKS)) if of_ranks else value
        value = of_first(sliced(value.detach(), others, mesh), cuts, mesh)
        if a < b:
            values = value.reshape(-1)[a - found.offset : b - found.offset]
            filler.write(index, a - start, values)

    return fill
