"""What ranks do together has a number and a name, so that ranks that are out of step are told apart at once.

Otherwise a rank that evaluates would take another rank's gradients for its parameters. A *meeting* is a run of a
captured step, a collective outside of one, or a round of agreement. At its start every rank sends what it is to the
next rank of the group, on the host; before the first result of a transfer is used, before the state is written and
before anything is returned, it compares what the rank before it has sent.

[Note: rings] If two ranks of a group do different things, some rank has a neighbour that does. That one leaves a
message for the others and takes the group down, which ends the transfers of ranks whose own neighbours agree. Those
cannot have finished: tags begin with a hash of the meeting, so transfers of different ones never meet.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..memory.turns import refuse_while_capturing
from ..util.process import the
from .failures import Signs, abandon, apart, backend_on, ends_by_itself, group_named, is_there, last_text, store_of_job
from .heartbeat import heartbeat
from .in_flight import Works, ended, pending

_BYTES = 160  # of a message: a digest and a name
_DIGEST = 8
_COUNTED = 17  # bits of a tag that count transfers; one marks those of a channel, 12 are a hash, bit 30 a message
_ROUND = "agree on "


Channel = tuple[int, int]  # the rank that sends, and the one that receives, in their group


class RanksOutOfStep(RuntimeError):
    """Ranks do different things. Every rank raises, no state is written, and the process group is taken down."""


class _Meeting(NamedTuple):
    number: int
    what: str
    rank: int  # of this process, in the job
    before: int  # whose message `theirs` is
    mine: Tensor
    theirs: Tensor
    works: Works


class Meetings:
    """The process's meetings. `captured`: whether a meeting lasts, as a captured step does, so that the transfers in
    it are not meetings of their own. `refused`: what may not communicate now.
    """

    def __init__(self) -> None:
        # By the group itself: one that is made anew, perhaps with other processes, begins anew.
        self._numbers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
        self._transfers: WeakKeyDictionary[dist.ProcessGroup, Counter[Channel | None]] = WeakKeyDictionary()
        self._hashes: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
        self._hosts: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
        self._open: deque[_Meeting] = deque()
        self.refused = ""
        self.captured = False
        the(Signs).before_leaving.append(self.forget)

    def begin(self, group: str, what: str, detail: str = "") -> None:
        """Tell the next rank of a group what this one does, unless that is part of a captured step.

        `what`: for people. `detail`: what else must be the same, such as a shape.
        """
        if self.refused:
            raise RuntimeError(
                f"{self.refused} communicates ({what}), which an eager_region may not do. Communicate "
                "outside the region."
            )
        if not self.captured:
            self._begin(group_named(group), what, _digest(what, detail))

    @contextlib.contextmanager
    def lasting(self, groups: Iterable[str], what: str, digest: bytes) -> Iterator[None]:
        """Hold a meeting of these groups, of which transfers inside are part."""
        for group in groups:
            self._begin(group_named(group), what, digest)
        self.captured = True
        try:
            yield
        finally:
            self.captured = False
        self.settle()

    @contextlib.contextmanager
    def none_inside(self, what: str) -> Iterator[None]:
        """Let `begin` raise inside: no communication is possible in `what`."""
        before, self.refused = self.refused, what
        try:
            yield
        finally:
            self.refused = before

    @contextlib.contextmanager
    def put_off(self) -> Iterator[list[Any]]:
        """Let what begins inside be settled where it is taken up: its transfers may be waited for after those of later
        meetings. Yields a list of it, for `take_up`.
        """
        before, found = len(self._open), list[Any]()
        try:
            yield found
        finally:
            while len(self._open) > before:
                found.insert(0, self._open.pop())

    def take_up(self, meetings: list[Any]) -> None:
        """Let the next `settle` wait for meetings that were put off."""
        self._open.extend(meetings)
        meetings.clear()

    def begin_round(self, what: str) -> None:
        """Tell every group that this rank waits for all others in the store."""
        for group in filter(is_there, list(self._numbers)):
            self._begin(group, f"{_ROUND}{what}", _digest(what, ""))

    def end_round(self) -> None:
        """Take the messages of a round, whose texts were compared already."""
        while self._open:
            self._receive(self._open.popleft())

    def settle(self) -> None:
        """Wait for what the ranks before this one have sent. Raises `RanksOutOfStep` if one is elsewhere, and
        `RuntimeError` if another rank has failed.
        """
        the(Signs).raise_if_aborted()
        while self._open:
            meeting = self._open.popleft()
            if not torch.equal(self._receive(meeting), meeting.mine):
                message = _difference(meeting)
                meeting.works().clear()  # which keep the group's connections open
                abandon(message)
                raise RanksOutOfStep(message)

    def next_tag(self, group: dist.ProcessGroup, channel: Channel | None = None) -> int:
        """Return the tag of a group's next transfer: equal on all ranks that are in the same meeting. `channel`: of the
        next one between two ranks, which the others do not count.
        """
        counts = self._transfers.setdefault(group, Counter())
        count = counts[channel] = (counts[channel] + 1) % (1 << _COUNTED)
        return (self._hashes.get(group, 0) << 1 | (channel is not None)) << _COUNTED | count

    def forget(self) -> None:
        """Drop meetings of a failed step, and whatever refers to groups."""
        self._open.clear()
        self._hosts.clear()
        self.captured = False

    def forked(self) -> None:
        """Drop everything in a forked process: the groups are the parent's."""
        self.__init__()  # type: ignore[misc]

    def _begin(self, group: dist.ProcessGroup, what: str, digest: bytes) -> None:
        size = group.size()
        if size == 1 or backend_on(group) == "fake":
            return
        refuse_while_capturing(what)
        if not ends_by_itself(group):
            heartbeat().start()  # which ends its transfers if another rank fails
        host, rank = self.host_of(group), group.rank()
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        self._hashes[group] = int.from_bytes(digest[:2], "little") & 0xFFF
        text = digest.ljust(_DIGEST, b"\0") + what.encode()[: _BYTES - _DIGEST].ljust(_BYTES - _DIGEST)
        mine, theirs = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.empty(_BYTES, dtype=torch.uint8)
        before, after, tag = (rank - 1) % size, (rank + 1) % size, 1 << 30 | number % (1 << 20)
        ranks = dist.get_process_group_ranks(group)

        def transfers() -> list[Any]:
            return [host.recv([theirs], before, tag), host.send([mine], after, tag)]

        works = pending().post(transfers)
        self._open.append(_Meeting(number, what, ranks[rank], ranks[before], mine, theirs, works))

    def _receive(self, meeting: _Meeting) -> Tensor:
        try:
            ended(meeting.works)
        except RuntimeError:
            self._open.clear()
            raise
        return meeting.theirs

    def host_of(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return a group of the same ranks that transfers tensors of the host."""
        if backend_on(group):
            return group
        if group not in self._hosts:
            ranks = dist.get_process_group_ranks(group)
            self._hosts[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return self._hosts[group]


def meetings() -> Meetings:
    """Return the process's meetings."""
    return the(Meetings)


def digest_of(text: str) -> bytes:
    """Return what two long descriptions are compared by."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()


def _digest(what: str, detail: str) -> bytes:
    return digest_of(f"{what}\0{detail}")


def _difference(meeting: _Meeting) -> str:
    rank, before = meeting.rank, meeting.before
    mine, theirs = (
        bytes(x[_DIGEST:].tolist()).decode(errors="replace").strip() for x in (meeting.mine, meeting.theirs)
    )
    said = [
        f"ranks are out of step: at communication {meeting.number}, rank {rank} does {mine!r} and rank {before} does "
        f"{theirs!r}" + (", for another signature." if mine == theirs else "."),
        "Every rank must run the same steps, evaluations and gathers in the same order. If a rank's loader has fewer "
        "batches, write `for batch in zerofn.even(loader)`. No state was written.",
    ]
    store = store_of_job()
    if store is not None and (mine == theirs or any(x.startswith(_ROUND) for x in (mine, theirs))):
        texts = [last_text(store, r) for r in (rank, before)]
        for r, text, other in zip((rank, before), texts, reversed(texts), strict=True):
            said.append(f"  rank {r} last agreed on: {apart(text, other)}")
    return "\n".join(said)


def _text(message: Tensor) -> str:
    return bytes(message[_DIGEST:].tolist()).decode(errors="replace").strip()
