"""A rank of `zerofn.run`: python -m zerofn.launch.worker FOLDER PID, with the number of the process that runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .tied_processes import end_with


def main(folder: Path, parent: int) -> None:
    """Call the function in `folder`, and leave its result, or its error, there; end with the process `parent`."""
    end_with(parent, str(folder))
    own = os.getpid()
    ranks, rank = int(os.environ["LOCAL_WORLD_SIZE"]), os.environ["RANK"]
    if "OMP_NUM_THREADS" not in os.environ:  # before torch is imported; all ranks share the processors
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    sys.path[:] = (folder / "path").read_text().split("\n")

    import torch.distributed as dist

    from .payload import packed, packed_error, unpacked

    try:
        fn, args, kwargs = unpacked((folder / "call").read_bytes())
        value = fn(*args, **kwargs)
        if os.getpid() != own:  # the function has forked this process
            return
        if rank == "0":
            (folder / "result").write_bytes(packed(value, "zerofn.run: the result"))
    except BaseException as error:
        if os.getpid() == own:
            (folder / f"error.{rank}").write_bytes(packed_error(error, skip=1))
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
