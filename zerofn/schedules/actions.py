"""Actions, the placement of stages on ranks, and a schedule: one list of actions for each rank.

A model is cut into *stages*, a batch into *microbatches*. A stage computes each microbatch forward and backward. The
backward pass has two halves: the gradient of the stage's input, for which the stage before it waits, and the gradients
of its weights, for which nobody waits.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B", "I", "W"]
Style = Literal["line", "loop", "v"]

# As torch.distributed.pipelining writes actions. Those of the second kind compute nothing.
_COMPUTED = re.compile(r"(\d+)([FBIW])(\d+)")
_OTHER = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One computation of one microbatch on one stage.

    `kind`: "F" is the forward pass, "B" the whole backward pass. In place of "B" come "I", the gradient of the stage's
    input, and later "W", the gradients of its weights. Stage 0 has no input that needs a gradient: its backward pass is
    one "B" in every schedule, even in those that split the other stages' backward passes.

    >>> str(Action(2, "F", 0)), Action.parse("1I3")
    ('2F0', Action(stage=1, kind='I', microbatch=3))
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action of a string such as "2F0": stage, kind, microbatch. Raises `ValueError` for any other."""
        found = _COMPUTED.fullmatch(text.strip())
        if not found:
            raise ValueError(
                f"{text!r} is not an action. Write stage, kind and microbatch, such as 2F0, 1B3, 1I3 or 1W3."
            )
        return cls(int(found[1]), cast(Kind, found[2]), int(found[3]))

    @property
    def makes(self) -> Action:
        """The value that this action makes and other actions wait for. A B makes the same value as an I."""
        return Action(self.stage, "I", self.microbatch) if self.kind == "B" else self

    def reads(self, num_stages: int) -> tuple[Action, ...]:
        """The values that must exist before this action, in a pipeline with this number of stages.

        >>> [str(x) for x in Action(1, "B", 3).reads(num_stages=4)]
        ['1F3', '2I3']
        """
        stage, kind, k = self
        if kind == "F":
            return (Action(stage - 1, "F", k),) if stage else ()
        if kind == "W":
            return (Action(stage, "I", k),)
        own = Action(stage, "F", k)
        return (own, Action(stage + 1, "I", k)) if stage + 1 < num_stages else (own,)


@dataclass(frozen=True)
class Placement:
    """Which rank has which stages; `chunks` is the number of stages on each rank.

    "line": stage s is on rank s. "loop": on rank s modulo `ranks`. "v": down the ranks and up again, so that the first
    and the last stage are both on rank 0 if there are two chunks.

    >>> Placement("loop", 4, 2).stages_of(1), Placement("v", 4, 2).stages_of(1)
    ((1, 5), (1, 6))
    """

    style: Style
    ranks: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.style not in ("line", "loop", "v"):
            raise ValueError(f"placement {self.style!r}: expected 'line', 'loop' or 'v'.")
        if self.ranks < 1 or self.chunks < 1:
            raise ValueError(f"a placement has at least 1 rank and 1 chunk, got {self.ranks} and {self.chunks}.")
        if self.style == "line" and self.chunks != 1:
            raise ValueError(f"placement 'line' has one stage per rank, got chunks={self.chunks}. Write 'loop' or 'v'.")

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.style == "v" and chunk % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in ascending order."""
        return tuple(s for s in range(self.num_stages) if self.rank_of(s) == rank)

    def __str__(self) -> str:
        """In words, for messages: "a loop of 4 ranks with 2 stages each"."""
        each = f" with {self.chunks} stages each" if self.chunks > 1 else ""
        return f"a {'V' if self.style == 'v' else self.style} of {self.ranks} ranks{each}"


@dataclass(frozen=True)
class Schedule:
    """What each rank computes: `orders[rank]`, in this order. See `zerofn.schedules.make` and `check`.

    `str(schedule)` is the text that `from_csv` reads.
    """

    name: str
    placement: Placement
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def chunks(self) -> int:
        """The number of stages on each rank."""
        return self.placement.chunks

    @property
    def num_stages(self) -> int:
        """The number of stages on all ranks."""
        return self.placement.num_stages

    def to_csv(self) -> str:
        """Return a line for each rank, actions between commas, as torch.distributed.pipelining's schedules read it.

        >>> from zerofn import schedules
        >>> print(schedules.make("1f1b", ranks=2, microbatches=2).to_csv())
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
        """
        return "\n".join(",".join(map(str, order)) for order in self.orders)

    __str__ = to_csv

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Read a schedule as `to_csv` or torch writes it. The stages of each rank follow from the text; `check` says
        whether the schedule works.

        Empty cells are idle time, which follows from costs; torch's transfers, gathers and reductions are left out, as
        `messages` and the step make their own. Stage 0's I is left out, and its W is read as B.

        Raises `ValueError` if a cell is not an action, or if no `Placement` has these stages on these ranks.
        """
        rows = csv.reader(io.StringIO(text.strip()))
        orders = tuple(tuple(whole_at_first(_read(row, f"{name}, line {i + 1}"))) for i, row in enumerate(rows))
        every = [action for order in orders for action in order]
        if not every:
            raise ValueError(f"{name} has no actions. Write one line for each rank, such as 0F0,0B0.")
        microbatches = 1 + max(action.microbatch for action in every)
        return cls(name, _placement_of(orders, name), microbatches, orders)


def whole_at_first(actions: Iterable[Action]) -> list[Action]:
    """Return actions with stage 0's backward pass in one: without its I, and with B for its W."""
    wanted = (a for a in actions if a.stage or a.kind != "I")
    return [a._replace(kind="B") if not a.stage and a.kind == "W" else a for a in wanted]


def _read(cells: Iterable[str], where: str) -> list[Action]:
    """The actions of a row; `where` is for errors."""
    out = []
    for i, cell in enumerate(cells):
        cell = cell.strip()
        together = _TOGETHER.fullmatch(cell)
        for text in together[1].split(";") if together else [cell]:
            if not text or _OTHER.fullmatch(text):
                continue
            try:
                out.append(Action.parse(text))
            except ValueError as error:
                raise ValueError(f"{where}, cell {i + 1}: {error}") from None
    return out


def _placement_of(orders: tuple[tuple[Action, ...], ...], name: str) -> Placement:
    """The placement in which every rank has the stages of its list."""
    stages = [tuple(sorted({a.stage for a in order})) for order in orders]
    ranks, most = len(orders), max(map(len, stages))
    for style in ("line", "loop", "v") if most == 1 else ("loop", "v"):
        placement = Placement(style, ranks, most)
        if stages == [placement.stages_of(r) for r in range(ranks)]:
            return placement
    found = "; ".join(f"line {r + 1}: {', '.join(map(str, x)) or 'none'}" for r, x in enumerate(stages))
    raise ValueError(
        f"{name}: ZeroFn does not support this assignment of stages to ranks: {found}. Each of the r lines must have "
        "the same number of stages. Put stage s on line s modulo r, or number the stages down the lines and up again."
    )
