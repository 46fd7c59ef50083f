"""One line of what must hold of a finished run. It needs nothing that is not always there."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Check:
    """`measured <= limit` (or `<`, where `strict`), of the median; `shown` has its interval too.

    `measured` is None where a row that it needs was left out by `--only`.
    """

    what: str
    shown: str
    measured: float | None
    limit: float
    strict: bool = False

    @property
    def kept(self) -> bool:
        if self.measured is None:
            return False
        return self.measured < self.limit if self.strict else self.measured <= self.limit
