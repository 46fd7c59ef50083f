"""An initialisation function, run leaf by leaf: `record` notes what it does, `Replay.run` does it holding little."""

from .materialize import Replay as Replay
from .materialize import record as record
