"""What an axis of a mesh is: one row of a table each. All other code asks for the properties, so that an axis is added
here.
"""

from __future__ import annotations

from dataclasses import dataclass

PIPE, DATA, REPLICATE, EXPERT, CONTEXT, TENSOR = "pipe", "data", "replicate", "expert", "context", "tensor"
BETWEEN = " x "  # in the name of an axis for several
# Axes of no mesh that somebody makes: of what each replica has of its own, and of what each rank has.
APART, RANKS = "replicate apart", "ranks apart"


@dataclass(frozen=True)
class AxisKind:
    """What ranks have of their own along an axis. All else is the same on them.

    `rows`: rows of the batch. `tokens`: tokens of the same rows. `shards`: shards of each unit. `replicas`: nothing
    else, so that gradients of shards are summed along it. `slices`: slices of leaves; in words, what a rank has then.
    `experts`: a unit of such slices is not cut into shards along the axis, and every other unit is. `stages`: a slice
    is a whole leaf, or nothing of it, and a leaf is sent to the others before its use. `partial`: what a rank computes
    with its slices is a part, and has to be summed along the axis before it meets what is whole.

    As code, for advice: `cuts` makes the cuts of a model of transformers, and `own_cuts` those of another one; before
    a step, `prepare` changes the model and the batch.
    """

    name: str
    rows: bool = False
    tokens: bool = False
    shards: bool = False
    replicas: bool = False
    slices: str = ""
    experts: bool = False
    stages: bool = False
    partial: bool = False
    cuts: str = ""
    own_cuts: str = ""
    prepare: str = ""

    @property
    def batch(self) -> bool:
        """Whether ranks have different parts of the batch. The loss and gradients are averaged along such axes."""
        return self.rows or self.tokens

    @property
    def only_rows(self) -> bool:
        """Whether ranks compute the same, each with rows of its own, and nothing else."""
        return self.rows and not self.slices

    @property
    def same_batch(self) -> bool:
        """Whether ranks share the work on the same part of the batch."""
        return not self.batch

    @property
    def shards_of_experts(self) -> bool:
        """Whether units of experts are cut into shards along it, as others are."""
        return self.shards and not self.experts

    @property
    def changes_model(self) -> bool:
        """Whether a model is made for such a mesh, with slices or for parts of rows. Along the others all ranks compute
        with the same model.
        """
        return self.tokens or bool(self.slices) and not self.stages


KINDS = {
    kind.name: kind
    for kind in (
        AxisKind(
            PIPE, slices="stage of layers", stages=True, cuts="zerofn.parallel.pipe(model, mesh, loss_fn, batch)"
        ),
        AxisKind(REPLICATE, rows=True, replicas=True),
        AxisKind(DATA, rows=True, shards=True),
        AxisKind(
            EXPERT, rows=True, shards=True, slices="experts", experts=True,
            cuts="zerofn.moe.experts(model, mesh)", own_cuts="zerofn.moe.cuts(params, mesh)",
        ),
        AxisKind(
            CONTEXT, tokens=True, shards=True,
            prepare="zerofn.parallel.context(model, mesh); batch = zerofn.parallel.split_sequence(batch, mesh); ",
        ),
        AxisKind(TENSOR, slices="slices of layers", partial=True, cuts="zerofn.parallel.tensor(model, mesh)"),
    )
}  # fmt: skip
_APART = {
    APART: AxisKind(APART, rows=True, slices="a replica's own state"),
    RANKS: AxisKind(RANKS, rows=True, slices="a rank's own state"),
}
USUAL = DATA  # the axis along which all ranks of a job are, if nobody makes a mesh


def kind_of(name: str) -> AxisKind:
    """Return what an axis is. One of another name is the only axis of its mesh, and like the usual one."""
    return _APART.get(name) or KINDS.get(name, KINDS[USUAL])


def in_batch(name: str) -> bool:
    """Return whether ranks have different parts of the batch along an axis, or along some of those that it is for."""
    return any(kind_of(part).batch for part in name.split(BETWEEN))
