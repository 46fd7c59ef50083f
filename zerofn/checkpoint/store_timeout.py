"""Whether a store answers. Libraries ask one that does not for minutes, time and again, before they say so."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

from ..util.errors import CheckpointError

T = TypeVar("T")

SILENCE = 20.0  # seconds that a request may take until the store's endpoint is asked for anything at all
_READ_TIMEOUT = 15.0  # seconds, s3fs's own


def asked(fs: Any, where: str, work: Callable[[], T]) -> T:
    """Return `work()`, a request to the store of a file system of fsspec. `where`: what it is about.

    A store that is slow is waited for, as long as something at its endpoint answers. Raises what `work` does, and
    `CheckpointError` if nothing does.
    """
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            errors.append(error)

    thread, start = threading.Thread(target=run, name="zerofn-request", daemon=True), time.monotonic()
    thread.start()
    thread.join(SILENCE)
    while thread.is_alive():
        endpoint = _endpoint(fs)
        if endpoint and not _answers(endpoint, max(SILENCE, _read_timeout(fs))) and thread.is_alive():
            raise CheckpointError(
                f"{where}: {endpoint} does not answer. A request has waited for {time.monotonic() - start:.0f} s, and "
                "a plain test request to this address got no answer either. Check the address (AWS_ENDPOINT_URL, "
                "endpoint_url=) and the network."
            )
        thread.join(SILENCE)
    if errors:
        raise errors[0]
    return result[0]


def _endpoint(fs: Any) -> str:
    """Return the address that requests of a file system go to; "" if it has none that is known."""
    with contextlib.suppress(Exception):  # one that could not make its client yet
        return str(getattr(fs, "endpoint_url", None) or fs.client_kwargs.get("endpoint_url") or fs.s3.meta.endpoint_url)
    return ""


def _read_timeout(fs: Any) -> float:
    """Return how many seconds a file system waits for one answer."""
    options = getattr(fs, "config_kwargs", None) or {}
    return float(options.get("read_timeout") or getattr(fs, "read_timeout", None) or _READ_TIMEOUT)


class _Here(urllib.request.HTTPRedirectHandler):
    """An answer that leads elsewhere is one."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


def _answers(address: str, seconds: float) -> bool:
    """Whether anything is said at an address, also that nothing is there."""
    try:
        with urllib.request.build_opener(_Here).open(address, timeout=seconds):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return not isinstance(error.reason, OSError) or "SSL" in type(error.reason).__name__
    except http.client.HTTPException:
        return True
    except OSError:
        return False
