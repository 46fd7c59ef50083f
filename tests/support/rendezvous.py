"""Ranks that run lists of computations, sends and receives by NCCL's rules: a transfer ends when both ends are there.

Each channel (from one rank to another) has a stream on both ranks, on which transfers follow each other. A computation
waits for the messages that it reads, and a `Sent` for what was sent; a send or a receive never keeps a rank.
"""

import itertools
from collections import Counter, defaultdict, deque

from zerofn.graph.messages import message_ends
from zerofn.graph.node_kinds import argument, is_start, start_of, traits
from zerofn.schedules import Compute, Edge, Message, Receive, Send, Sent

OTHERS = "all stages"  # the stream of transfers that are no messages


def stuck(programs, stream=lambda message: message.channel):
    """What the ranks wait for in the end, one text each; nothing if all is done. `stream` names that of a message."""
    at, done = [0] * len(programs), set()
    streams = defaultdict(deque)  # (rank, name) -> what was put on it
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(programs):
            while at[rank] < len(steps) and _may_go(steps[at[rank]], done):
                step = steps[at[rank]]
                if isinstance(step, Send | Receive):
                    streams[rank, stream(step.message)].append(step)
                at[rank] += 1
                moved = True
        for (rank, name), queue in list(streams.items()):
            while queue and _meets(queue[0], rank, name, streams):
                message = queue[0].message
                for end in message.channel:
                    streams[end, name].popleft()
                done.add(message)
                moved = True
    computing = [
        f"rank {r}: {steps[i]}" for r, i, steps in zip(range(len(at)), at, programs, strict=True) if i < len(steps)
    ]
    return computing + [f"rank {r}: {queue[0]}" for (r, _), queue in streams.items() if queue]


def received_where_used(programs):
    """The same lists, but each receive right before the computation that reads it."""
    out = []
    for steps in programs:
        rest = [step for step in steps if not isinstance(step, Receive)]
        out.append([y for x in rest for y in ([*map(Receive, x.reads), x] if isinstance(x, Compute) else [x])])
    return out


def _may_go(step, done):
    waited = step.reads if isinstance(step, Compute) else [step.message] if isinstance(step, Sent) else []
    return done.issuperset(waited)


def _meets(step, rank, name, streams):
    """Whether the other end of a transfer is at the head of its stream, too."""
    message = step.message
    other = streams[message.target if rank == message.source else message.source, name]
    return bool(other) and other[0].message == message and isinstance(other[0], Send) != isinstance(step, Send)


def steps_of(graph, rank, size):
    """The same of a rank's scheduled graph: its messages, its other transfers between the stages, and each wait as a
    computation that reads what it waits for. Another transfer is messages between all its ranks, in one order on each.
    """
    steps, begun, numbers = [], {}, Counter()

    def add(node, source, target, name):
        edge = Edge(source, target, "F", name)
        message = Message(edge, 0, source, target, numbers[source, target, name == OTHERS])
        numbers[source, target, name == OTHERS] += 1
        begun.setdefault(node, []).append(message)
        steps.append(Send(message) if source == rank else Receive(message))

    ends = {end.node: end for end in message_ends(graph)}
    for node in graph.nodes:
        if (end := ends.get(node)) is not None:
            add(node, *((rank, end.peer) if end.sends else (end.peer, rank)), end.edge)
        elif is_start(node):
            sources = argument(node, "holders")[:1] if traits(node).collective == "broadcast" else range(size)
            for source, target in itertools.product(sources, range(size)):
                if source != target and rank in (source, target):
                    add(node, source, target, OTHERS)
        elif (start := start_of(node)) in begun:
            steps.append(Compute(node.name, tuple(begun[start])))
    return tuple(steps)


def stream_of(message):
    """Messages have a stream for each channel, and all other transfers one together."""
    return OTHERS if message.edge.name == OTHERS else message.channel
