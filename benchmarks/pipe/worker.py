"""One rank of one row in a process of its own; prints one JSON line that starts with RESULT.

pipe.py starts it: python -m benchmarks.pipe.worker ROW --rank R --world N --port P --workload W --steps K
"""

from __future__ import annotations

from functools import partial

from benchmarks.mesh.worker import run
from benchmarks.pipe.rows import WORKLOADS, builders
from benchmarks.step.worker import answer

if __name__ == "__main__":
    answer(__doc__, "row", WORKLOADS, partial(run, builders=builders, workloads=WORKLOADS))
