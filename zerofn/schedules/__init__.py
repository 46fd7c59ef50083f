"""Pipeline schedules as pure functions of numbers: what each rank computes, in which order, and how long that takes.

`make` gives a schedule by name, `simulate` its timeline for the costs of each stage, and `messages` what each rank
computes, sends and receives. `best` finds the fastest schedule for given costs within a limit of memory, and `balance`
spreads a model's layers over stages.
"""

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


def __dir__() -> list[str]:
    return list(__all__)
