"""Deferred initialisation: `record` logs what a function does, `Replay.run` does it leaf by leaf, with little in
memory.
"""

from .materialize import Replay as Replay
from .materialize import record as record
