"""`value_and_grad` and `accumulate`: gradients of a loss, over ranks and microbatches.

Gradients are taken with `torch.autograd.grad` on detached leaves. `torch.func.grad` refuses saved-tensor hooks and
old-style autograd functions, and takes about twice the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from .. import tree
from ..capture.advice import instead, not_constant
from ..capture.float8_products import note_products
from ..capture.loop import in_parts, loop
from ..capture.shared_regions import shared_region
from ..capture.unused import note_gradients
from ..collectives.maps import heard_transfers
from ..collectives.over_ranks import sum_over
from ..comm.axes import in_batch
from ..comm.current_mesh import axes_of
from ..comm.mesh import Axis, Mesh
from ..geometry.leaf_choices import ask_names, check_effect, is_learned
from ..graph.phase import BACKWARD, FORWARD, phase
from ..random import fold_in, randomness
from ..random.draws import fold_in_rank
from ..sharding.gather_scatter import gather_leaves
from ..sharding.sharded import is_sharded, mesh_among
from ..util.arguments import checked, known_arguments
from .checkpoint_params import same_parameters
from .float8 import Products, float8_products
from .gradient_sums import WHEN, GradientSums, When, flat_gradients, no_gradient
from .loss_errors import check_gradient
from .loss_scale import NoLossScale, check_loss_scale
from .loss_value import Loss, loss_of

P = ParamSpec("P")  # what a loss function takes after the parameters
A = TypeVar("A")  # its aux
F = TypeVar("F")


@overload
def value_and_grad(
    loss_fn: Callable[Concatenate[Any, P], Any],
    has_aux: Literal[False] = False,
    scale: Any = None,
    rng: Tensor | None = None,
    frozen: Callable[[str], bool] | None = None,
) -> Callable[Concatenate[Any, P], tuple[Tensor, Any]]: ...
@overload
def value_and_grad(
    loss_fn: Callable[Concatenate[Any, P], tuple[Any, A]],
    has_aux: Literal[True],
    scale: Any = None,
    rng: Tensor | None = None,
    frozen: Callable[[str], bool] | None = None,
) -> Callable[Concatenate[Any, P], tuple[tuple[Tensor, A], Any]]: ...
@checked()
def value_and_grad(
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    scale: Any = None,
    rng: Tensor | None = None,
    frozen: Callable[[str], bool] | None = None,
) -> Any:
    """Return `f(params, *args) -> (loss, grads)`, or `((loss, aux), grads)` with `has_aux`.

    `loss_fn(params, *args)` receives full parameters in the compute dtype. It returns a scalar, the mean over this
    rank's batch; or `(sum, weight)`, for a mean that is weighted exactly over ranks and microbatches. `params` is
    `Sharded`, plain, or a tree of both. A plain tree alone never communicates; with a `Sharded` in `params`, all ranks
    must call `f`.

    `loss` is the mean over the global batch, in float32, or in float64 if `loss_fn` returns that. `aux` is this
    rank's own. `grads` has the structure of `params`, is averaged over ranks in the reduce dtype, and is unscaled.
    Unused parameters get zeros.

    `scale`: a loss scale. `rng`: the key for random operations, which raise without a key, and for stochastic rounding
    of gradients that are sent (`zerofn.Wire`). Use a new key for each step. `frozen(leaf name)`: which plain leaves get
    gradients of zero, as integers do; a `Sharded` tree stores which of its leaves are frozen. `f` raises `TypeError`
    for a complex leaf, and `ValueError` or `TypeError` if `loss_fn` does not return a loss, if the loss has no
    gradient, or if `frozen` selects no leaf. It warns if the weight depends on the parameters.

    >>> f = value_and_grad(lambda w, x: (w * x).mean())
    >>> f(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    (tensor(5.5000), tensor([1.5000, 2.0000]))
    """
    check_loss_scale(scale, "value_and_grad: scale")
    return ValueAndGrad(loss_fn, has_aux, scale if scale is not None else NoLossScale(), rng, frozen)


@dataclass(frozen=True)
class ValueAndGrad:
    """The result of `value_and_grad`. `accumulate` sets `num_microbatches` and `reduces`. `apart`: gradients are not
    added over ranks, see `optim.phases`. `errors`: what codes have left out so far, of `Feedback`.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    scale: Any
    rng: Tensor | None
    frozen: Callable[[str], bool] | None = None
    num_microbatches: int = 1
    reduces: str | None = None
    apart: bool = False
    errors: Any = None

    def with_microbatches(self, n: int, reduce: str | None) -> ValueAndGrad:
        """Return the same function with `n` times as many microbatches; see `accumulate`."""
        return replace(self, num_microbatches=n * self.num_microbatches, reduces=reduce or self.reduces)

    def __call__(self, params: Any, *args: Any) -> tuple[Any, Any]:
        """Return (loss, grads), or ((loss, aux), grads) with `has_aux`."""
        return self.with_errors(params, *args)[:2]

    def with_errors(self, params: Any, *args: Any) -> tuple[Any, Any, Any]:
        """Return the same, and what codes have left out of these gradients; None without feedback."""
        paths, nodes, treedef = tree.flatten_with_path(params, is_leaf=is_sharded)
        if self.frozen is not None and not any(map(is_sharded, nodes)):
            names = [tree.name_of(p) for p in paths]
            check_effect("value_and_grad: frozen", self.frozen, ask_names("frozen", self.frozen, names))
        learns = [_trainable(tree.name_of(p), x, self.frozen) for p, x in zip(paths, nodes, strict=True)]
        mesh = mesh_among(nodes)
        work = _Work(self, paths, nodes, learns, treedef, mesh)
        work.sums.check(self.rng)
        with axes_of(mesh):
            if not work.loops:
                loss, aux, partial = work.microbatch(nodes, args, 0)
                sums, left = work.summed(partial, loss[1], 0)
            else:
                loss, aux, sums, left = work.loop(args)
        value, grads = work.finish(loss, sums)
        grads = self.scale.unscale(grads)
        return ((value, aux) if self.has_aux else value), grads, left


@known_arguments
def accumulate(vg: F, n: int, *, reduce: When | None = None) -> F:
    """Return `vg` over `n` microbatches, one after another: a large batch in the memory of a small one.

    `vg`: the function that `value_and_grad` returned. Every tensor leaf of the arguments after `params` is cut along
    dim 0 into `n` equal contiguous microbatches. Loss and gradients are averaged over microbatches, and aux is stacked
    along a new dim 0. A microbatch sees the buffers that the previous one wrote. If `vg` already accumulates over `m`
    microbatches, the result accumulates over `m * n`. Capture records one microbatch and loops over it; nothing is
    unrolled.

    `reduce`: when gradients are summed over ranks. "microbatch": in each microbatch, so that a rank stores only shards
    of the sums. At stage 0, and along `replicate`, the sums are gathered after the last microbatch. "step": once, after
    the last microbatch, which sends 1/n of the bytes, but stores full gradients, in the reduce dtype. "round": once for
    every p microbatches, where p is the number of ranks along `pipe` (a pipeline works on p microbatches at the same
    time); without `pipe`, in each microbatch. None: "step" at stages 0 and 1, "microbatch" at stages 2 and 3. The
    choices sum in different orders, so their results differ by rounding; for any one choice, all stages give the same
    bits.

    Raises `TypeError` if `vg` is not such a function, and `ValueError` if `n` is not a positive integer, if `reduce` is
    unknown or if a leaf cannot be cut.

    >>> f = accumulate(value_and_grad(lambda w, x: (w * x).mean()), 2)
    >>> f(torch.tensor(2.0), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    (tensor(5.), tensor(2.5000))
    """
    if not hasattr(vg, "with_microbatches"):
        raise TypeError(
            f"accumulate: vg must be the function that value_and_grad returns, got {type(vg).__name__}. Write "
            "zerofn.accumulate(state.value_and_grad(loss_fn), n)."
        )
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"accumulate: n must be a positive integer, got {n!r}.")
    if reduce not in (None, *WHEN):
        raise ValueError(f"accumulate: reduce must be 'step', 'round', 'microbatch' or None, got {reduce!r}.")
    return vg.with_microbatches(n, reduce)


@dataclass(frozen=True)
class _Work:
    """One call of `ValueAndGrad`.

    `paths`, `nodes`: the parameters' nodes, `Sharded` or plain tensors. `treedef`: the tree of these nodes.
    """

    vg: ValueAndGrad
    paths: Sequence[tree.Path]
    nodes: list[Any]
    learns: list[list[bool]]  # for each node: whether each of its leaves gets a gradient
    treedef: tree.PyTreeSpec
    mesh: Mesh | None

    @property
    def axis(self) -> Axis | None:
        """The ranks with different parts of the batch."""
        return None if self.mesh is None else self.mesh.batch

    @property
    def loops(self) -> bool:
        """Whether microbatches are rounds of a loop; on stages of a pipeline a single one is, too."""
        return self.vg.num_microbatches > 1 or self.mesh is not None and self.mesh.stages.size > 1

    @property
    def sums(self) -> GradientSums:
        """How gradients are added over ranks."""
        apart = self.vg.apart and self.num_ranks > 1
        return GradientSums(self.nodes, self.learns, self.axis, apart, None if apart else self.vg.errors)

    @property
    def num_ranks(self) -> int:
        return 1 if self.axis is None else self.axis.size

    def microbatch(
        self, nodes: list[Any], args: Sequence[Any], index: Any
    ) -> tuple[tuple[Tensor, Tensor | None], Any, list[Tensor]]:
        """Return the local loss with its weight, aux, and gradients: a flat tensor for each trainable unit, and one for
        each trained plain leaf.
        """
        full = [gather_leaves(x) if is_sharded(x) else [x] for x in nodes]
        leaves = [
            [_leaf(t, ok) for t, ok in zip(ts, learns, strict=True)]
            for ts, learns in zip(full, self.learns, strict=True)
        ]
        logical = [
            tree.unflatten(x.layout.treedef, ts) if is_sharded(x) else ts[0]
            for x, ts in zip(nodes, leaves, strict=True)
        ]
        wanted = [t for ts in leaves for t in ts if t.requires_grad]
        key = self._key(index)
        products = self._products(leaves)

        def differentiated() -> tuple[tuple[Tensor, Tensor | None], Any, Tensor | None, Sequence[Tensor | None]]:
            with torch.enable_grad(), randomness(key), same_parameters(), float8_products():
                with phase(FORWARD), heard_transfers() as heard:
                    loss = self._loss(tree.unflatten(self.treedef, logical), args, wanted)
                check_gradient(loss.mean, wanted)
                factor, share = self._factor(loss, heard)
                with phase(BACKWARD):
                    return loss.detached, loss.aux, factor, _derivatives(loss.mean, wanted, self._seed(loss, share))

        given = None if products else (leaves, args, key)  # products are told of their weights inside
        parts = self.num_ranks, self.vg.num_microbatches
        loss, aux, factor, found = shared_region(differentiated, self.vg.loss_fn, given, parts)
        by_leaf = {id(t): g for t, g in zip(wanted, found, strict=True)}
        note_gradients(lambda: self._used(leaves, by_leaf))
        for each in products:
            note_products(each.told)
        return loss, aux, flat_gradients(nodes, leaves, by_leaf, factor)

    def _products(self, leaves: list[list[Tensor]]) -> list[Products]:
        """Let linear layers know the weights of states whose precision has float8 products."""
        rules = [x.spec.precision.fp8 if is_sharded(x) else None for x in self.nodes]
        return [
            Products(rule, {leaf.name: ts[leaf.index] for leaf in x.layout.leaves})
            for rule, x, ts in zip(rules, self.nodes, leaves, strict=True)
            if rule is not None
        ]

    def _used(self, leaves: list[list[Tensor]], found: dict[int, Tensor | None]) -> Iterator[tuple[str, bool]]:
        """Yield (name, whether the loss uses it) of every leaf that is trained."""
        for path, x, ts in zip(self.paths, self.nodes, leaves, strict=True):
            names = {leaf.index: leaf.name for leaf in x.layout.leaves} if is_sharded(x) else {}
            for k, t in enumerate(ts):
                if id(t) in found:
                    yield tree.name_of((*path, names[k]) if names else path), found[id(t)] is not None

    def _key(self, index: Any) -> Tensor | None:
        if self.vg.rng is None:
            return None
        own = fold_in(self.vg.rng, 0) if self.axis is None else fold_in_rank(self.vg.rng, self.axis.rank)
        return fold_in(own, index)

    def key_of_codes(self, index: Any) -> Tensor | None:
        """Return what draws the codes of gradients that are sent for a microbatch, or for all; None if nothing does."""
        return self._key(index) if self.sums.draw else None

    def _loss(self, params: Any, args: Sequence[Any], wanted: Sequence[Tensor]) -> Loss:
        loss_fn = self.vg.loss_fn
        try:
            out = loss_fn(params, *args)
        except Exception as error:
            advised = instead(error)
            if advised is None:
                raise
            raise advised.with_traceback(error.__traceback__) from None
        return loss_of(out, self.vg.has_aux, wanted)

    def _factor(self, loss: Loss, heard: Sequence[Axis]) -> tuple[Tensor | None, Tensor | None]:
        """Return (what gradients are multiplied by behind the backward pass, what the loss is before it).

        That is the weight, behind, since half precision may not hold it. Where ranks with other weights have exchanged
        values, a rank's gradients are of the others' losses, too: then it is the mean of all weights, and each loss
        enters with its own part of that. `heard`: the axes along which the loss function has exchanged values.
        """
        if loss.weight is None or self.axis is None or not any(in_batch(axis.name) for axis in heard):
            return loss.weight, None
        mean = sum_over(loss.weight, self.axis) / self.num_ranks
        mean = torch.where(mean == 0, torch.ones_like(mean), mean)
        return mean, loss.weight / mean

    def _seed(self, loss: Loss, share: Tensor | None) -> Tensor:
        # The seed of the backward pass divides by ranks and microbatches, which saves a pass over the gradients.
        parts = 1 if loss.weight is not None else self.num_ranks * self.vg.num_microbatches
        seed = torch.full_like(loss.mean.detach(), 1.0 / parts)
        return self.vg.scale.scale(seed if share is None else seed * share)

    def summed(self, flats: Sequence[Tensor], weight: Tensor | None, first: int) -> tuple[list[Tensor], Any]:
        """Return what this rank stores of the sums over ranks of whole gradients, and what codes have left out of them.
        `weight`: of all this rank's microbatches. `first`: the number of the key for the first part of `flats`.
        """
        if self.sums.errors is None:
            parts = self.sums.added(flats, lambda part: self.key_of_codes(first + part))
            return self.sums.stored(parts), None
        one = torch.ones((), device=flats[0].device) if flats else torch.ones(())
        by = self.vg.scale.scale(one)
        if weight is not None:
            by = by * (weight if self.axis is None else sum_over(weight, self.axis)).to(by.dtype)
        parts, left = self.sums.fed_back(flats, None if by is one else by)
        return self.sums.stored(parts), left

    def loop(self, args: Sequence[Any]) -> tuple[tuple[Tensor, Tensor | None], Any, list[Tensor], Any]:
        """Run all microbatches; return ((sum of losses, sum of weights), stacked aux, sums of gradients, what codes
        have left out of these).

        Without weights, the first is the mean of the losses, and the second None.
        """
        n, stages = self.vg.num_microbatches, 1 if self.mesh is None else self.mesh.stages.size
        late, rounds = self.sums.when(self.vg.reduces, n, stages)
        passed = tree.tree_map(lambda x: None if callable(x) and not isinstance(x, Tensor) else x, args)
        error = not_constant("accumulate", "an argument's", passed)
        if error is not None and n > 1:  # its tensors would stay whole
            raise error
        leaves, treedef = tree.flatten(args)
        parts = [in_parts("accumulate", x, n) if isinstance(x, Tensor) else x for x in leaves]
        nodes = self.nodes

        def body(index: Tensor, mine: list[Tensor]) -> tuple[list[Tensor], list[Tensor], Any]:
            fresh = iter(mine)
            values = tree.unflatten(treedef, [next(fresh) if isinstance(x, Tensor) else x for x in leaves])
            loss, aux, flats = self.microbatch(nodes, values, index)
            # Clone: the loss or weight may be a buffer that the next microbatch writes.
            pair = [x.clone() for x in loss if x is not None]
            return (
                pair + (flats if late else self.sums.own(flats, self.key_of_codes(index))),
                aux,
                (tree.structure(aux), len(pair) == 2),
            )

        sums, stacked, (like, weighted) = loop(body, n, [p for p in parts if isinstance(p, Tensor)], rounds)
        head = 2 if weighted else 1
        left = None
        if late:  # with keys that no microbatch has
            grads, left = self.summed(sums[head:], sums[1] if weighted else None, n)
        else:
            grads = self.sums.stored(sums[head:])
        total = sums[0] if weighted else sums[0] / n
        if self.vg.num_microbatches == 1:
            rows = [x.squeeze(0) if isinstance(x, Tensor) else x[0] for x in like.flatten_up_to(stacked)]
            stacked = tree.unflatten(like, rows)
        return (total, sums[1] if weighted else None), stacked, grads, left

    def finish(self, loss: tuple[Tensor, Tensor | None], sums: list[Tensor]) -> tuple[Tensor, Any]:
        """Return the mean of the loss over the global batch, and gradients in the structure of the parameters."""
        total, weight = loss
        for axis in self.mesh.partial if self.mesh is not None else ():
            total = torch.ops.zerofn.expect(total, axis.name, "loss")
        if self.axis is not None:
            total = sum_over(total, self.axis)
            weight = None if weight is None else sum_over(weight, self.axis)
            total = total / self.num_ranks if weight is None and self.num_ranks > 1 else total
        if weight is not None:
            total = total / weight
            sums = [g / weight.to(g.dtype) for g in sums]
        found = iter(sums)
        out: list[Any] = []
        for x, learns in zip(self.nodes, self.learns, strict=True):
            if not is_sharded(x):
                out.append(next(found) if learns[0] else no_gradient(x))
                continue
            out.append(self.sums.tree_of(x, found))
        return total, tree.unflatten(self.treedef, out)


def _trainable(name: str, node: Any, frozen: Callable[[str], bool] | None) -> list[bool]:
    if not is_sharded(node):
        return [is_learned(name, node, lambda name: frozen is None or not frozen(name))]
    marks = {leaf.index: unit.trainable for unit in node.layout.units for leaf in unit.leaves}
    return [marks[i] for i in range(len(marks))]


def _leaf(x: Tensor, learns: bool) -> Tensor:
    x = x.data  # unlike `detach`, with its own count of writes: leaves of a unit lie in one buffer
    x._is_param = True  # for `isinstance(x, nn.Parameter)`, such as in `get_parameter` of a module that it is lent to
    return x.requires_grad_() if learns else x


def _derivatives(loss: Tensor, wanted: list[Tensor], seed: Tensor) -> Sequence[Tensor | None]:
    if not wanted or not loss.requires_grad:
        return [None] * len(wanted)
    return torch.autograd.grad(loss, wanted, grad_outputs=seed, allow_unused=True)
