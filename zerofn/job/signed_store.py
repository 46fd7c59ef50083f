"""The job's store, where only what the job's own ranks have written counts.

Whoever reaches the store's port can write to it: another job with the same address, or somebody else on the network.
Its values end jobs and name a process to be killed, so each carries a signature with the job's secret. ZEROFN_SECRET
is that secret, if it is set; else the first rank to come draws one and leaves it in the store, which keeps mistakes
apart and cannot stop a person who reads the store before writing to it. torchrun's store has no authentication.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets

import torch.distributed as dist

from .._torch_compat import connected_again

_SECRET = "zerofn/secret"
_DIGEST = 32  # hexadecimal digits before a text
PART = 1 << 20  # characters, of 4 bytes at most: torch's store ends the connection of whoever sends 8 MiB at once
_PARTS = "\2"  # begins what is written in place of a longer text: the number of its parts, which have keys of their own


class SignedStore:
    """Texts by key. Raises `torch.distributed.DistError` when the store is gone."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self._secret = store, os.environ.get("ZEROFN_SECRET", "")

    def set(self, key: str, text: str) -> None:
        """Write a text of any length."""
        parts = [text[k : k + PART] for k in range(0, len(text), PART)] if len(text) > PART else []
        for k, part in enumerate(parts):
            self._store.set(f"{key}/part {k}", part)
        self._store.set(key, self._signature(key, text) + (f"{_PARTS}{len(parts)}" if parts else text))

    def set_first(self, key: str, text: str) -> None:
        """Write a text unless a rank has written one there."""
        signed = self._signature(key, text) + text
        self._store.compare_set(key, "", signed)
        if self.get(key) is None:
            self._store.set(key, signed)

    def get(self, key: str) -> str | None:
        """Return a text at once; None if no rank of the job has written one."""
        if not self._store.check([key]):
            return None
        value = self._store.get(key).decode(errors="replace")
        text = value[_DIGEST:]
        if re.fullmatch(_PARTS + "[0-9]{1,4}", text):
            keys = [f"{key}/part {k}" for k in range(int(text[1:]))]
            if not self._store.check(keys):
                return None
            text = "".join(self._store.get(each).decode(errors="replace") for each in keys)
        return text if hmac.compare_digest(value[:_DIGEST].encode(), self._signature(key, text).encode()) else None

    def has_foreign(self, key: str) -> bool:
        """Whether something is there that no rank of the job has written."""
        return self.get(key) is None and bool(self._store.check([key]))

    def delete(self, key: str) -> None:
        """Remove a text, where the store can."""
        with contextlib.suppress(RuntimeError, NotImplementedError):
            k = 0
            while self._store.delete_key(f"{key}/part {k}"):
                k += 1
            self._store.delete_key(key)

    def connected_again(self) -> SignedStore:
        """Return this store through a connection of its own, for another thread."""
        return SignedStore(connected_again(self._store))

    def _signature(self, key: str, text: str) -> str:
        if not self._secret:
            self._secret = self._store.compare_set(_SECRET, "", secrets.token_hex(16)).decode()
        signed = hmac.new(self._secret.encode(), f"{key}\0{text}".encode(errors="replace"), hashlib.sha256)
        return signed.hexdigest()[:_DIGEST]
