"""Ranks that run lists of computations, sends and receives by NCCL's rules: a transfer ends when both ends are there.

Each channel (from one rank to another) has a stream on both ranks, on which transfers follow each other. A computation
waits for the messages that it reads, and a `Sent` for what was sent; a send or a receive never keeps a rank.
"""

from collections import defaultdict, deque

from zerofn.schedules import Compute, Receive, Send, Sent


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
