"""Two object stores for tests: one in a local folder, which does no more than such stores do, and moto's S3."""

from __future__ import annotations

import contextlib
import logging
import os
import urllib.request
from collections.abc import Iterator

import fsspec
from fsspec.implementations.local import LocalFileSystem
from upath import UPath
from upath.registry import register_implementation

FULL = "full"  # part of the names of objects that do not fit


class Objects(LocalFileSystem):
    """Objects under `objects:///folder`: written from the beginning to the end, read, listed and removed."""

    protocol = "objects"

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("objects://"))

    def _open(self, path, mode="rb", block_size=None, **kwargs):
        assert mode in ("rb", "wb"), mode
        if mode == "wb":
            self.makedirs(self._parent(path), exist_ok=True)
        if mode == "wb" and FULL in str(path) and str(path).endswith(".safetensors"):
            super()._open(path, mode, block_size, **kwargs).close()
            raise OSError(28, "No space left in the bucket")
        return super()._open(path, mode, block_size, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(f"{path}.coming", value, mode, **kwargs)
        os.replace(self._strip_protocol(f"{path}.coming"), self._strip_protocol(path))

    def _cannot(self, *args, **kwargs):
        raise NotImplementedError("an object store cannot do this")

    mv = mv_file = rename = link = symlink = touch = chmod = cp_file = _cannot


class ObjectsPath(UPath):
    """A path there."""


fsspec.register_implementation("objects", Objects, clobber=True)
register_implementation("objects", ObjectsPath, clobber=True)


@contextlib.contextmanager
def s3_server() -> Iterator[UPath]:
    """A server of S3 in this process; yields a bucket there."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    try:
        options = {"key": "a", "secret": "b", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
        bucket = UPath("s3://bucket", **options)
        bucket.fs.mkdir("bucket")
        yield bucket
    finally:
        # All of moto's servers in one process share what they hold: the next one begins with nothing.
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST"))
        server.stop()
