"""What a step sends, by its plan and by the transport's own counter."""

import zerofn
from zerofn.comm.transport import SentBytes
from zerofn.util.process import the


def planned_and_sent(run, state, x):
    """Bytes of a step, planned and sent by this process, with what it leaves under way."""
    plan, before = run.lower(state, x), the(SentBytes).by_group.total()
    state, _ = run(state, x)
    zerofn.unshard(state.params)  # waits for copies
    zerofn.unshard(state.params)
    twice, before = the(SentBytes).by_group.total() - before, the(SentBytes).by_group.total()
    zerofn.unshard(state.params)
    return plan.sent, twice - 2 * (the(SentBytes).by_group.total() - before)
