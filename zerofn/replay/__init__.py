"""An initialisation function, run leaf by leaf: `record` notes what it does, `Replay.run` does it holding little."""

from .schedule import Replay as Replay
from .schedule import record as record
