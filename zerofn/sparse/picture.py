"""Pictures of layouts in notebooks."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

_CELLS, _SIDE = 64, 192  # most cells of a row, and the points of the longer side


def svg(status: Tensor, label: str) -> str:
    """Return one head's tiles [queries, keys] as a picture: the darker, the more of a tile is attended. Tiles that are
    too many for a picture are joined; neighbours in a row that are alike are one rectangle.
    """
    sizes = (min(_CELLS, status.shape[0]), min(_CELLS, status.shape[1]))
    part = torch.nn.functional.adaptive_avg_pool2d(status[None].to(torch.float32) / 2, sizes)[0]
    side = _SIDE / max(1, *sizes)
    cells = []
    for row, parts in enumerate(part.mul(10).round().int().tolist()):
        at = 0
        for shade, alike in itertools.groupby(parts):
            num = len(list(alike))
            if shade:
                cells.append(
                    f'<rect x="{at * side:g}" y="{row * side:g}" width="{num * side:g}" height="{side:g}" '
                    f'fill-opacity="{shade / 10:g}"/>'
                )
            at += num
    height, width = (n * side for n in sizes)
    return (
        f'<svg role="img" aria-label="{label}" width="{width:g}" height="{height:g}" fill="currentColor" '
        f'style="border:1px solid;margin:2px"><title>{label}</title>{"".join(cells)}</svg>'
    )
