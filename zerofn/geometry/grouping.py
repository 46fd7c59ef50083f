"""Which leaves form a unit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from torch import Tensor

from .. import tree
from ..tree import Path
from .leaf_choices import ask_names

_NAMED = 3  # units merged into another that its title names
SMALL = 1 << 16  # elements: smaller units are not worth a collective of their own


def units_by_leaf(
    paths: Sequence[Path],
    values: Sequence[Tensor],
    order: Sequence[int],
    unit: Callable[[str], str] | None,
    stages: Mapping[int, tuple[int, ...]],
) -> dict[int, str]:
    """Map each leaf's index to the name of its unit: what `unit` says of its name, or one a layer.

    `order`: the leaves' indices, sorted. `stages`: by index, where a leaf lies; a small unit joins one of its stages.
    """
    if unit is not None:
        names = ask_names("unit", unit, [tree.name_of(paths[i]) for i in order])
        wrong = next((name for name, group in names.items() if not isinstance(group, str)), None)
        if wrong is not None:
            raise TypeError(
                f"unit({wrong!r}) returns {names[wrong]!r}, but it must return the name of a unit, a str, for every "
                "leaf. Leave unit out to get one unit for each layer."
            )
        return {i: names[tree.name_of(paths[i])] for i in order}
    members: dict[tuple[Hashable, str], list[int]] = {}
    for i in order:
        top = str(paths[i][0]) if len(paths[i]) > 1 else ""
        members.setdefault(((top, stages[i]), _group(paths[i])), []).append(i)
    found: dict[int, str] = {}
    last: dict[Hashable, str] = {}
    for (key, name), indices in members.items():
        if key not in last or sum(values[i].numel() for i in indices) >= SMALL:
            last[key] = name
        found.update(dict.fromkeys(indices, last[key]))
    return found


def title(unit: str, leaves: Sequence[str]) -> str:
    """Return the name of a unit with those of small units that were merged into it, which have leaves of their own.

    >>> title("h.1", ["h.1.attn.weight", "h.1.attn.bias", "norm.weight"])
    'h.1 + norm'
    """
    found = dict.fromkeys(_group((name,)) for name in leaves)
    name, sign, kind = unit.partition(" (")
    if name not in found:
        return unit  # the user has named it
    others = [x for x in found if x != name]
    more = f" + {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    return " + ".join([name, *others[:_NAMED]]) + more + sign + kind


def _group(path: Path) -> str:
    parts = tree.components(path)
    for k, part in enumerate(parts):
        if isinstance(part, int):
            return ".".join(map(str, parts[: k + 1]))
    return ".".join(map(str, parts[:-1] or parts))
