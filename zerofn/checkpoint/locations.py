"""Where checkpoints lie: in a folder, or anywhere that fsspec reaches, such as `s3://bucket/run`.

[Note: objects] An object store keeps objects under names with slashes. An object appears whole when its last byte is
there, or not at all; it cannot be changed, renamed, linked, locked or touched. So what begins a file there must be
known before its end is: see `write_file`. `universal_pathlib` gives such places the methods of `Path`; what differs,
and what must not be left to its defaults (it removes folders with all that is in them), is in this file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import stat
from pathlib import Path
from typing import IO, Any, cast

from ..util.errors import CheckpointError
from .store_timeout import asked

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_PART = 8 << 20  # bytes of an upload's parts, at least
_MAX_PARTS = 9_000  # S3 takes 10,000
MAX_TEXT = 1 << 30  # bytes of a manifest, an index and the like
_KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_FRESH: dict[str, Any] = {"use_listings_cache": False}  # other ranks and jobs change what is there


def located(path: str | os.PathLike[str]) -> Path:
    """Return the whole path, with `~` and links resolved; of a URL, what universal_pathlib calls a path.

    Raises `ImportError` if that library is missing, and `ValueError` for a URL that fsspec does not know.
    """
    given = cast(Any, path)
    if hasattr(given, "storage_options") and not isinstance(given, Path):
        return cast("Path", type(given)(str(given), **{**given.storage_options, **_FRESH}))
    text = os.fspath(path)
    if "::" in text.partition("://")[0] and "://" in text:
        raise ValueError(
            f"{text}: chained file systems may serve old copies of files. Write the URL of the last one only."
        )
    url = _URL.match(text)
    if url is None:
        return Path(path).expanduser().resolve()
    if url[1] in ("file", "local"):
        return Path(text[url.end() :]).resolve()
    if importlib.util.find_spec("upath") is None:
        raise ImportError(
            f"{text}: paths of {url[1]}:// need the package universal_pathlib. Type pip install 'zerofn[remote]'."
        )
    from upath import UPath

    return cast("Path", UPath(text, **_FRESH))


def is_remote(path: Path) -> bool:
    """Whether a path that `located` gave is reached through fsspec."""
    return not isinstance(cast(object, path), Path)


def is_link(path: Path) -> bool:
    """Whether a path is a symbolic link; a store that is reached through fsspec has none."""
    return not is_remote(path) and path.is_symlink()


def _fs(path: Path) -> tuple[Any, str]:
    """The file system, and its own name of the path."""
    remote = cast(Any, path)
    return remote.fs, remote.path


def fetch(path: Path, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) of a file, fewer if it ends before."""
    if is_remote(path):
        fs, name = _fs(path)
        return asked(fs, str(path), lambda: cast(bytes, fs.cat_file(name, start=start, end=stop)))
    _check_kind(path)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(stop - start)


def text_of(path: Path) -> str:
    """Return what a file says. A remote one is read in one request: opened, it fails if it is replaced meanwhile."""
    if not is_remote(path):
        nbytes = _check_kind(path)
        if nbytes > MAX_TEXT:
            raise CheckpointError(f"{path} has {nbytes:,} bytes; a file of this kind may have at most {MAX_TEXT:,}.")
        return path.read_text("utf-8")
    fs, name = _fs(path)
    return asked(fs, str(path), lambda: cast(bytes, fs.cat_file(name))).decode()


def check_answers(path: Path) -> None:
    """Raise `CheckpointError` if `path`, a file which need not be there, is in a store that cannot be reached."""
    if is_remote(path):
        try:
            fetch(path, 0, 1)
        except (OSError, CheckpointError) as error:
            if isinstance(error, CheckpointError):
                raise
        except Exception as error:  # of the library, which has its own
            raise CheckpointError(f"{path}: the storage service cannot be reached: {error}.") from error


def _check_kind(path: Path) -> int:
    """Return the bytes of a file. Raises `CheckpointError` for what is none: to open a named pipe waits for a writer,
    and a device never ends.
    """
    status = path.stat()
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise CheckpointError(f"{path} is {_KINDS.get(kind, 'not a file')}, but must be a file. Remove it.")
    return status.st_size


def upload(path: Path, nbytes: int) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open a remote file of `nbytes` bytes to write, from its beginning to its end."""
    fs, name = _fs(path)
    return cast(
        contextlib.AbstractContextManager[IO[bytes]],
        fs.open(name, "wb", block_size=max(_PART, -(-nbytes // _MAX_PARTS))),
    )


def put(path: Path, text: str) -> None:
    """Give a remote file new contents at once."""
    fs, name = _fs(path)
    asked(fs, str(path), lambda: fs.pipe_file(name, text.encode()))


def make_folder(path: Path) -> None:
    """Make a folder and those around it. Raises `CheckpointError` for a bucket that is not there."""
    if not is_remote(path):
        path.mkdir(parents=True, exist_ok=True)
        return
    fs, name = _fs(path)
    if path.drive and not fs.exists(path.drive):
        raise CheckpointError(f"save: {path}: {path.drive!r} does not exist, or may not be read. Create it first.")
    fs.makedirs(name, exist_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder if it is empty; some stores have none."""
    with contextlib.suppress(OSError, NotImplementedError):
        if is_remote(path):
            fs, name = _fs(path)
            fs.rmdir(name)
        else:
            path.rmdir()
