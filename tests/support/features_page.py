"""The page "What goes together", made of the cases that tests compare with plain torch and of what `shard` refuses.

python -m tests.support.features_page docs/together.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.together import (
    EXACT,
    FEATURES,
    REFUSED,
    ROUNDS,
    ROWS,
    STEPS,
    Feature,
    Pair,
    cover,
    covered,
    pairs_of,
    refusal,
)

GROUPS = {
    "stage": ("stage", ""),
    "mesh": ("mesh", "an axis of `Mesh.make`"),
    "optimizer": ("optimizer state", "`Offload(optimizer=...)`"),
    "params": ("parameters", "`Offload(params=...)`"),
    "hpz": ("", "`shard(hpz=True)`"),
    "precision": ("", "`shard(precision=...)`"),
    "accumulate": ("", "`zerofn.accumulate(..., 2)`"),
    "remat": ("remat", "`compile(remat=...)`"),
    "wire": ("wire", "`shard(wire=...)`; `feedback` is `int8` with `Wire(feedback=True)`"),
    "backend": ("", "`compile(backend=...)`"),
}
TESTED, NOT_POSSIBLE, UNTESTED, SAME = "●", "✕", "○", ""

HEAD = """# What goes together

Each cell is a pair of features:

- ● **tested**: a test trains with both, and compares the parameters with plain PyTorch's.
- ✕ **refused**: `shard` raises an error, which is shown below the table.
- ○ **untested**.

A cell is empty if its two features are values of the same option, such as bf16 and fp16. Of {all} pairs, {tested} are
tested, {refused} are refused and {untested} {are} untested. For DiLoCo, 1-bit optimizers and stochastic rounding,
see [a table of their own](wire.md#what-goes-together); for the schedules of a pipeline, see
[Pipelines](pipelines.md#guarantees).
"""
TAIL = """## How pairs are tested

{cases} cases cover all tested pairs (`tests/equivalence/test_together.py`). Each case has two axes of two ranks, or
three axes with `hpz`, and a value of every other option. One of them is:

> {example}

All ranks run over gloo on a CPU. A case trains a Mixtral of two layers for {steps} steps on {rows} rows. The test
measures how far the parameters are from those of plain PyTorch in float32, relative to how far training has moved
them. Every feature but half precision and wire codecs is also in a case that computes and sends float32, where this
distance is below {exact:.0e}. Half precision and wire codecs round, so each of them may increase this distance:

| feature | adds at most |
|---|---:|
{rounds}

Three features need a GPU. The tests replace the GPU as follows:

- `graphs`: in place of a CUDA graph, a recorder on the host repeats calls with their addresses and numbers. Here it
  records the first step already.
- `optimizer state cpu` and `parameters cpu`: the tests treat host memory as if it were separate from the memory that
  the model uses, and let the host update half of the units.

Other pages say more about single features, for example
[how models on meshes compare with plain PyTorch](performance.md#on-meshes).
"""


def label(feature: Feature) -> str:
    """What the page calls a feature."""
    words = GROUPS[feature.group][0]
    return f"{words} {feature.value}" if words and feature.group != "mesh" else feature.value


def table(tested: set[Pair]) -> list[str]:
    """The pairs as rows and columns."""
    columns = [label(x) for x in FEATURES]
    lines = [f"| | {' | '.join(columns)} |", f"|---|{':-:|' * len(columns)}"]
    for row in FEATURES:
        cells = []
        for column in FEATURES:
            pair = frozenset((row, column))
            if pair not in pairs_of(FEATURES):
                cells.append(SAME)
            else:
                cells.append(TESTED if pair in tested else NOT_POSSIBLE if pair in REFUSED else UNTESTED)
        lines.append(f"| **{label(row)}** | {' | '.join(cells)} |")
    return lines


def refused() -> list[str]:
    """The refused pairs, those with one sentence together."""
    found: dict[str, list[str]] = {}
    for pair, case in REFUSED.items():
        found.setdefault(refusal(case), []).append(named(pair))
    return [f"- {', '.join(pairs)}:\n\n    > {sentence}\n" for sentence, pairs in found.items()]


def named(pair: Pair) -> str:
    """A pair's name, in the order of the table."""
    return " with ".join(label(x) for x in FEATURES if x in pair)


def page() -> str:
    """The whole page."""
    every = pairs_of(FEATURES)
    tested = set().union(*map(covered, cover())) & every
    untested = every - tested - set(REFUSED)
    counts = {"all": len(every), "tested": len(tested), "refused": len(REFUSED), "untested": len(untested)}
    parts = [HEAD.format(**counts, are="is" if len(untested) == 1 else "are"), *table(tested), ""]
    parts += ["| feature | how to turn it on |", "|---|---|"]
    for group, (_, how) in GROUPS.items():
        values = ", ".join(f"`{label(x)}`" for x in FEATURES if x.group == group)
        parts.append(f"| {values} | {how or '`shard(stage=...)`'} |")
    parts += ["", "## Refused", "", *refused()]
    if untested:
        parts += ["## Untested", "", *(f"- {named(x)}" for x in sorted(untested, key=named)), ""]
    rounds = "\n".join(f"| `{label(x)}` | {most} |" for x, most in ROUNDS.items())
    parts.append(
        TAIL.format(cases=len(cover()), example=cover()[0], steps=STEPS, rows=ROWS, exact=EXACT, rounds=rounds)
    )
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
