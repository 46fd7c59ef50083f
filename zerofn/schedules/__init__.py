"""Pipeline schedules as pure functions of numbers: what each rank computes, in which order, and how long that takes.

`make` returns a schedule by name, `simulate` its timeline for the costs of each stage, and `messages` what each rank
computes, sends and receives. `best` finds the fastest schedule for known costs within a limit of memory, and
`balance` spreads a model's layers over stages.

Words:

- *stage*: the part of a model between two cuts. *Placement*: which rank computes which stage.
- *action*: F, B, I or W of one stage and one microbatch. F is the forward pass. I is the gradient of the stage's
  input, for which the stage before it waits. W is the gradients of its weights, for which no stage waits. B is I and W
  together.
- *schedule*: one list of actions for each rank.
- *channel*: all messages from one rank to another one.

How a schedule is made: `named.py` makes the schedules of the literature (GPipe, 1F1B, interleaved 1F1B, ZB-H1, ZB-V).
`from_costs.best` also tries schedules in which ranks decide in simulated time what to compute next (`greedy.py`), and
keeps the fastest that fits. `check` says whether a schedule is complete and cannot get stuck. `messages` adds sends
and receives. `zerofn.passes.cut_stages` turns the result into a graph. Users write schedules of their own in the text
form of torch.distributed.pipelining.

Choices:

- A simulation decides which schedule is fastest, where W stands and how layers are spread, because these depend on
  one another. Among the cuts whose ranks are almost equally busy, the best is up to 7 % faster than the worst.
- A rank posts its receives in the order in which the sender posts its sends. On NCCL a transfer ends only when both
  ranks have posted it, and the next transfer of the channel waits for that. Receives that are posted where they are
  used get stuck in schedules with several stages per rank. gloo buffers, and hides the mistake;
  `tests/support/rendezvous.py` simulates NCCL's rules.

Invariant: no function here uses tensors, graphs or process groups, so every schedule is tested without ranks.

Start reading: `actions.py`, then `named.py` and `simulate.py`.
"""

from typing import TYPE_CHECKING

from ..util.names import of_package
from .actions import Action, Kind, Placement, Schedule
from .balance import Part, balance, stage_costs
from .check import check
from .from_costs import best, fill, usual_limit
from .messages import Compute, Edge, Message, Receive, Send, Sent, messages
from .named import NAMES, make
from .simulate import Costs, Timeline, simulate

__all__ = [
    "NAMES",
    "Part",
    "Action",
    "Compute",
    "Costs",
    "Edge",
    "Kind",
    "Message",
    "Placement",
    "Receive",
    "Schedule",
    "Send",
    "Sent",
    "Timeline",
    "balance",
    "best",
    "check",
    "fill",
    "make",
    "messages",
    "simulate",
    "stage_costs",
    "usual_limit",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = of_package(__name__, __all__)
