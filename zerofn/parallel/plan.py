"""The entries of a tensor-parallel plan: how a layer's weights are sliced, and what happens to its input and output.

The words are those of transformers' `tp_plan`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ..util.arguments import check_fields
from ..util.errors import nearest
from ..util.patterns import pattern_of

Kind = Literal["linear", "embedding", "experts", "identity", "varied", "plain", "latent", "sequence"]
KINDS = get_args(Kind)


@dataclass(frozen=True)
class Slice:
    """How a layer's weights are sliced over the tensor axis.

    `dim`: of the weight [out, in] of a linear layer, even if the weight is stored transposed; or of a parameter, if the
    plan's key names one. None leaves the weights whole. `parts`: the number of matrices that lie one after the other
    along `dim`; each is sliced. `input`: "equal", all ranks pass in the same input; "cut", each rank passes in its
    slice of the last dim; "take", all ranks pass in the same input, of which the layer takes this rank's slice.
    `output`: "cut", this rank's slice of the last dim; "sum", partial sums, which are added up over ranks; "concat",
    slices, which are gathered to all ranks; "equal", the same output on all ranks, so nothing is sent. `kind`: of
    module, such as "embedding", which computes with its slices in a special way; most kinds have a word.

    A linear layer that is sliced along "out" has equal inputs, and its output is "cut" or "concat": `COLWISE` is
    `Slice(-2, output="cut")`. One that is sliced along "in" has the input "cut" or "take", and the output "sum":
    `ROWWISE` is `Slice(-1, input="cut")`.

    >>> from zerofn import parallel
    >>> plan = {"blocks.*.up": parallel.Slice(-2, output="cut"), "blocks.*.down": parallel.Slice(-1, input="cut")}
    >>> plan["blocks.*.down"].output  # partial sums are added up over ranks
    'sum'
    """

    dim: int | None
    parts: int = 1
    input: Literal["equal", "cut", "take"] = "equal"
    output: Literal["cut", "sum", "concat", "equal"] = "sum"
    kind: Kind = "linear"

    def __post_init__(self) -> None:
        check_fields(self, "dim")
        if isinstance(self.parts, bool) or not isinstance(self.parts, int) or self.parts < 1:
            raise ValueError(f"Slice: expected parts to be a number of matrices, 1 or more, got {self.parts!r}.")
        for what, value, known in (
            ("input", self.input, ("equal", "cut", "take")),
            ("output", self.output, ("cut", "sum", "concat", "equal")),
            ("kind", self.kind, KINDS),
        ):
            if value not in known:
                raise ValueError(f"Slice: {what}={value!r} is not known. Write one of {', '.join(map(repr, known))}.")


COLWISE = Slice(-2, input="equal", output="cut")
ROWWISE = Slice(-1, input="cut", output="sum")
WORDS: dict[str, Slice] = {
    "colwise": COLWISE,
    "colwise_gather_output": replace(COLWISE, output="concat"),
    "colwise_rep": replace(COLWISE, output="concat"),
    "rowwise": ROWWISE,
    "rowwise_split_input": replace(ROWWISE, input="take"),
    "rowwise_rep": replace(ROWWISE, input="take"),
    "packed_colwise": replace(COLWISE, parts=2),
    "packed_rowwise": replace(ROWWISE, parts=2),
    "embedding_rowwise": Slice(0, kind="embedding", output="sum"),
    "embedding_colwise": Slice(1, kind="embedding", output="concat"),
    "moe_tp_experts": Slice(None, kind="experts", output="sum"),
    "moe_identity_expert": Slice(None, kind="identity", output="equal"),
    "replicated_with_grad_allreduce": Slice(None, kind="varied", input="cut", output="cut"),
    "all_reduce": Slice(None, kind="plain", input="cut", output="sum"),
    "mla_kv_a_proj": Slice(None, kind="latent", output="equal"),
    "sequence_parallel": Slice(None, kind="sequence", output="equal"),
    "local_params": Slice(None, kind="plain", output="equal"),
    "replicate": Slice(None, kind="plain", output="equal"),
}


def of_matrix(where: str, how: Slice, num_dims: int) -> Slice:
    """Return the entry for a linear layer, with its `dim` counted from the end: -2 is "out", and -1 "in".

    `where`: the layer. `num_dims`: of its weight. Raises `ValueError` for another dim, and for an input or an output
    that a slice along this dim cannot have.
    """
    assert how.dim is not None
    dim = how.dim if how.dim < 0 else how.dim - max(num_dims, 2)
    if dim not in (-2, -1):
        raise ValueError(f"{where}: the weight of a linear layer is [out, in], and has no dim {how.dim} to slice.")
    inputs, outputs = (("equal",), ("cut", "concat")) if dim == -2 else (("cut", "take"), ("sum",))
    if how.input not in inputs or how.output not in outputs:
        raise ValueError(
            f"{where}: a layer that is sliced along {('in' if dim == -1 else 'out')!r} needs input={_either(inputs)} "
            f"and output={_either(outputs)}, got {how.input!r} and {how.output!r}."
        )
    return replace(how, dim=dim)


def _either(words: Iterable[str]) -> str:
    return " or ".join(map(repr, words))


def slice_of(key: str, value: Any) -> Slice:
    """Return the `Slice` of a plan's entry. Raises `ValueError` for an unknown word, else `TypeError`."""
    if isinstance(value, Slice):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"plan[{key!r}]: expected a word of tp_plan or a zerofn.parallel.Slice, got a {type(value).__name__}."
        )
    if value not in WORDS:
        near = nearest(value, WORDS)
        hint = f"; did you mean {near[0]!r}?" if near else f"; write one of {', '.join(WORDS)}."
        raise ValueError(f"plan[{key!r}]={value!r} is not known{hint}")
    return WORDS[value]


def did_you_mean(key: str, names: Iterable[str]) -> str:
    """Return the end of a sentence that offers the nearest of `names`, with `*` for numbers."""
    found = nearest(key, {pattern_of(name) for name in names if name})
    return f"; did you mean {found[0]!r}?" if found else "."
