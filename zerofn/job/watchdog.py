"""A thread that hears of another rank's failure where transfers do not end by themselves.

gloo's transfers end when the other rank's connections close. A kernel of NCCL goes on waiting for a rank that is gone,
and the host waits for the kernel, wherever it reads a number. So this thread asks the store once a second, and aborts
the groups, which ends their kernels. What they leave behind is no result: the failure is raised at the next wait, and
at the end of the step.
"""

from __future__ import annotations

import contextlib
import threading

import torch.distributed as dist

from .._torch_compat import abort_groups
from ..util.process import the
from .failures import Signs, backend_on, is_there, published_failure, store_of_job
from .signed_store import SignedStore

SECONDS = 1.0  # between two looks at the store
ENDS_BY_ITSELF = ("", "gloo", "fake")  # backends whose transfers end when a rank is gone


class FailureWatch:
    """`failure`: what another rank has said, once this thread has heard it and aborted the groups."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self._over: dist.ProcessGroup | None = None

    def over(self, group: dist.ProcessGroup) -> None:
        """Watch until the job's process group is gone, if a transfer of this group could wait for ever."""
        if self._over is None and is_there(group):
            self.failure = None  # of groups before this one
        if self._over is not None or backend_on(group, "cuda") in ENDS_BY_ITSELF:
            return
        store, self._over = store_of_job(), dist.group.WORLD
        if store is not None:
            own = store.connected_again()  # the caller may block on the other one
            threading.Thread(target=self._look, args=(own,), name="zerofn-watch", daemon=True).start()

    def tell(self) -> None:
        """Raise `RuntimeError` if another rank has failed."""
        if self.failure is not None:
            the(Signs).let_go()
            raise RuntimeError(f"stopped, because another rank failed. {self.failure}")

    def forked(self) -> None:
        """Stop in a forked process: the groups are the parent's."""
        self._over = None

    def _look(self, store: SignedStore) -> None:
        pause, group = threading.Event(), self._over
        while group is not None and is_there(group):
            with contextlib.suppress(RuntimeError, dist.DistStoreError):  # the store may be gone
                message = published_failure(store)
                if message is not None:
                    with the(Signs).leaving:
                        the(Signs).taken_down = self.failure = message
                        abort_groups()
            pause.wait(SECONDS)
        self._over = None


def watch() -> FailureWatch:
    """Return the process's watch."""
    return the(FailureWatch)
