"""Fake tensors of a recording, which knows what its own thread does to them, and nothing of others."""

from __future__ import annotations

import threading
from typing import Any

from .._torch_compat import FakeTensorMode


class OneThreadsFakes(FakeTensorMode):
    """The mode of fake tensors of the thread that makes it. `check` says whether another one has used them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._thread = threading.get_ident()
        self._used_by = ""

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            self._used_by = threading.current_thread().name
        return super().__torch_dispatch__(*args, **kwargs)

    def check(self) -> None:
        """Raise `RuntimeError` if another thread has worked on these tensors. An error there would be lost with it."""
        if self._used_by:
            raise RuntimeError(
                f"initialisation works on its tensors in another thread, {self._used_by}, where operations are not "
                "recorded. Work in the thread that runs the function, or pass `shard` the finished state instead."
            )
