"""Which values a rank sends and receives, and where among its actions.

All messages from one rank to another are a *channel*. Its transfers follow each other: one ends only when sender and
receiver are both there, and the next one begins after that. So both ends have to post them in one order, which is that
of the sends. A rank then receives some values before it needs them.

Received where they are used instead, the messages of many schedules are posted in a different order from that of the
sends: in a V a rank sends its neighbour activations of one chunk and gradients of the other. Both ranks then wait for
ever. (gloo, which buffers what is sent, hides that.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from .actions import Action, Schedule
from .simulate import Costs, Timeline, simulate


class Edge(NamedTuple):
    """A value that stage `source` makes and stage `target` reads, of each microbatch; stages between them may be
    skipped. `kind`: "F", made and read by forward passes; "I", by those that make gradients of inputs (I or B). `name`:
    any that tells edges between the same stages apart.

    >>> activations, gradients = Edge(0, 1, "F"), Edge(1, 0, "I")
    >>> activations
    Edge(source=0, target=1, kind='F', name='x')
    """

    source: int
    target: int
    kind: Literal["F", "I"]
    name: str = "x"


class Message(NamedTuple):
    """A value of one microbatch on its way between two ranks. `number`: how many messages of the channel come before
    it.

    >>> Message(Edge(0, 1, "F"), microbatch=2, source=0, target=1, number=2).channel
    (0, 1)
    """

    edge: Edge
    microbatch: int
    source: int
    target: int
    number: int

    @property
    def channel(self) -> tuple[int, int]:
        """The ranks that send and receive."""
        return self.source, self.target


class Compute(NamedTuple):
    """Run an action, when the messages that it reads have arrived.

    >>> from zerofn import schedules
    >>> orders = messages(schedules.make("gpipe", ranks=2, microbatches=1), [Edge(0, 1, "F")])

    >>> [str(step.action) for step in orders[1] if isinstance(step, Compute)]
    ['1F0', '1B0']
    """

    action: Action
    reads: tuple[Message, ...]


class Send(NamedTuple):
    """Begin to send the value that the previous action made. Only the message's `Sent` waits for its end.

    >>> from zerofn import schedules
    >>> orders = messages(schedules.make("gpipe", ranks=2, microbatches=1), [Edge(0, 1, "F")])

    >>> [step.message.target for step in orders[0] if isinstance(step, Send)]
    [1]
    """

    message: Message


class Receive(NamedTuple):
    """Begin to receive a value. The `Compute` that reads the value waits for the end of the transfer.

    >>> from zerofn import schedules
    >>> orders = messages(schedules.make("gpipe", ranks=2, microbatches=1), [Edge(0, 1, "F")])

    >>> [step.message.source for step in orders[1] if isinstance(step, Receive)]
    [0]
    """

    message: Message


class Sent(NamedTuple):
    """Wait until a message was sent: its value may be overwritten then.

    >>> from zerofn import schedules
    >>> orders = messages(schedules.make("gpipe", ranks=2, microbatches=1), [Edge(0, 1, "F")])

    >>> [step.message.microbatch for step in orders[0] if isinstance(step, Sent)]
    [0]
    """

    message: Message


Step = Compute | Send | Receive | Sent


def messages(schedule: Schedule, edges: Sequence[Edge], costs: Costs | None = None) -> tuple[tuple[Step, ...], ...]:
    """Return, for each rank, its actions, sends and receives.

    A value is sent right after the action that makes it; several values are sent in the order of `edges`. Receives of a
    channel have the order of its sends. A receive is posted before the action that the receiver runs, in simulated
    time, when the send begins: if it were posted later, the sender would wait; if earlier, it would occupy memory.

    In simulated time, a message arrives while the sender runs other actions. The sender waits for the end of the
    transfer before the second action that begins after the arrival. So it waits only if it is far ahead of the
    receiver, and never forever, because the receive has been posted by then.

    `costs` (equal ones if None) decide only where receives and waits stand, never the order of messages. All ranks must
    pass the same costs. An edge between stages of one rank makes no message.

    Raises `ValueError` for an edge that leads to no other stage or against its kind's direction.

    >>> from zerofn import schedules
    >>> schedule = schedules.make("gpipe", ranks=2, microbatches=1)
    >>> for step in messages(schedule, [Edge(0, 1, "F"), Edge(1, 0, "I")])[1]:
    ...     print(type(step).__name__, step.action if isinstance(step, Compute) else step.message.edge.name)
    Receive x
    Compute 1F0
    Compute 1B0
    Send x
    Sent x
    """
    for edge in edges:
        _check(edge, schedule)
    costs = costs or Costs.even(schedule.num_stages)
    line = simulate(schedule, costs)
    sent = _sent(schedule, edges)
    arrivals: defaultdict[Action, list[Message]] = defaultdict(list)  # what reads them, with kind I for B
    for of_action in sent.values():
        for message in of_action:
            arrivals[Action(message.edge.target, message.edge.kind, message.microbatch)].append(message)
    posted = _posted(line, sent)
    ended = _ended(line, sent, posted, costs)
    out = []
    for rank, order in enumerate(schedule.orders):
        steps: list[Step] = []
        for i, action in enumerate(order):
            steps += [Receive(x) for x in posted[rank, i]]
            steps += [Sent(x) for x in ended[rank, i]]
            steps.append(Compute(action, tuple(arrivals[action.makes])))
            steps += [Send(x) for x in sent[action]]
        steps += [Sent(x) for x in ended[rank, len(order)]]
        out.append(tuple(steps))
    return tuple(out)


def _check(edge: Edge, schedule: Schedule) -> None:
    if not (0 <= edge.source < schedule.num_stages and 0 <= edge.target < schedule.num_stages):
        raise ValueError(f"{edge}: {schedule.placement} has stages 0 to {schedule.num_stages - 1}.")
    down = edge.source < edge.target
    if edge.source == edge.target or down != (edge.kind == "F"):
        raise ValueError(f"{edge}: values of kind F are sent to later stages, and values of kind I to earlier stages.")


def _sent(schedule: Schedule, edges: Sequence[Edge]) -> defaultdict[Action, list[Message]]:
    """Behind each action, what it sends."""
    made: defaultdict[tuple[int, str], list[Edge]] = defaultdict(list)
    rank_of = schedule.placement.rank_of
    for edge in edges:
        if rank_of(edge.source) != rank_of(edge.target):
            made[edge.source, edge.kind].append(edge)
    sent: defaultdict[Action, list[Message]] = defaultdict(list)
    for rank, order in enumerate(schedule.orders):
        numbers: Counter[int] = Counter()
        for action in order:
            for edge in made[action.stage, action.makes.kind]:
                to = rank_of(edge.target)
                sent[action].append(Message(edge, action.microbatch, rank, to, numbers[to]))
                numbers[to] += 1
    return sent


def _posted(line: Timeline, sent: dict[Action, list[Message]]) -> defaultdict[tuple[int, int], list[Message]]:
    """`[rank, i]`: the receives that stand before a rank's action `i`."""
    channels: defaultdict[tuple[int, int], list[tuple[Message, float]]] = defaultdict(list)
    use: dict[Action, int] = {}
    for spans in line.spans:
        for i, (action, _, stop) in enumerate(spans):
            use.setdefault(action.makes, i)
            for message in sent.get(action, ()):
                channels[message.channel].append((message, stop))
    starts = [[span.start for span in spans] for spans in line.spans]
    posted: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for (_, target), sends in channels.items():
        last, places = len(starts[target]), []
        for (edge, k, *_), stop in reversed(sends):  # none behind one that is sent later, or behind what reads it
            begun = max(0, bisect_right(starts[target], stop) - 1)
            last = min(last, begun, use[Action(edge.target, edge.kind, k)])
            places.append(last)
        for (message, _), place in zip(sends, reversed(places), strict=True):
            posted[target, place].append(message)
    return posted


def _ended(
    line: Timeline, sent: dict[Action, list[Message]], posted: dict[tuple[int, int], list[Message]], costs: Costs
) -> defaultdict[tuple[int, int], list[Message]]:
    """`[rank, i]`: the messages whose end stands before a rank's action `i`; behind the last one, the others."""
    starts = [[span.start for span in spans] for spans in line.spans]
    begins = {x: starts[rank][i] for (rank, i), found in posted.items() for x in found}
    ended: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    placement = line.schedule.placement
    for rank, spans in enumerate(line.spans):
        for action, _, stop in spans:
            for message in sent.get(action, ()):
                neighbours = _neighbours(message.edge)
                there = max(begins[message], stop) + sum(costs.transfer(placement, *x) for x in neighbours)
                at = bisect_right(starts[rank], there)
                ended[rank, min(at + 1, len(spans))].append(message)
    return ended


def _neighbours(edge: Edge) -> list[tuple[int, int]]:
    """The boundaries that a value would cross one by one: what skips stages takes no longer than that."""
    step = 1 if edge.source < edge.target else -1
    return [(s, s + step) for s in range(edge.source, edge.target, step)]
