"""The command line: plan a step, measure a machine, start ranks, and look at configurations and checkpoints.

`commands.py` has the parser and the short commands; `plan.py` has `zerofn plan`. Errors are printed as one sentence,
without a traceback, and the exit status is 1.

Start reading: `commands.py`.
"""

from .commands import main as main
