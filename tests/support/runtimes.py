"""The runtime of a test: as users have it, or the one that `ZEROFN_RUNTIME=late` or `=ordered` asks for."""

import contextlib
import os
from typing import Any

from tests.support.happens_before import ordered
from tests.support.late_runtime import late

RUNTIMES: dict[str, Any] = {"": contextlib.nullcontext, "late": late, "ordered": ordered}


def asked() -> contextlib.AbstractContextManager[Any]:
    """Return what a test runs in."""
    return RUNTIMES[os.environ.get("ZEROFN_RUNTIME", "")]()  # type: ignore[no-any-return]
