"""The runtime of a test: as users have it, or what `ZEROFN_RUNTIME=late`, `=ordered` or `=replayed` asks for."""

import contextlib
import os
from typing import Any

from tests.support.happens_before import ordered
from tests.support.late_runtime import late
from tests.support.replayed import replayed

RUNTIMES: dict[str, Any] = {"": contextlib.nullcontext, "late": late, "ordered": ordered, "replayed": replayed}


def asked() -> contextlib.AbstractContextManager[Any]:
    """Return what a test runs in."""
    return RUNTIMES[os.environ.get("ZEROFN_RUNTIME", "")]()  # type: ignore[no-any-return]
