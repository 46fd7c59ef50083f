"""The ranks of a Lightning run, joined and spoken to."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

import zerofn


class Ranks(ParallelStrategy):
    """What a strategy does with its ranks: starts them if no launcher has, and lets Lightning's loops speak to all."""

    num_nodes = 1

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        if self.local_rank >= len(self.parallel_devices):
            raise ValueError(
                f"Trainer(devices={self.num_processes}): the launcher has started more ranks on this machine: this one "
                f"has the local rank {self.local_rank}. Set devices= to the number of ranks on this machine."
            )
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks of this machine."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning has samplers to divide, and logs to reduce."""
        return self.num_nodes * self.num_processes > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's share of the data."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # A launcher sets variables of several ranks; whatever runs here afterwards would take itself for one of them.
        if self.is_distributed and not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the ranks."""
        super().setup_environment()
        where = self.cluster_environment
        assert where is not None
        where.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        where.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        if self.world_size > 1 and not dist.is_initialized():
            told: dict[str, Any] = {
                "RANK": self.global_rank,
                "WORLD_SIZE": self.world_size,
                "LOCAL_RANK": self.local_rank,
            }
            told |= {"MASTER_ADDR": where.main_address, "MASTER_PORT": where.main_port}
            os.environ.update({k: str(v) for k, v in told.items()})
        found = zerofn.world_size()  # joins the ranks
        if found != self.world_size:
            raise ValueError(
                f"Trainer(devices={self.num_processes}, num_nodes={self.num_nodes}) are {self.world_size} ranks, but "
                f"{found} were started. Use the same numbers as the launcher."
            )

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on all ranks."""
        if not dist.is_initialized():
            return obj
        found = [obj]
        dist.broadcast_object_list(found, src)
        return found[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or what else `reduce_op` says, of a tensor over ranks."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        word = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        mean = word in ("mean", "avg", None)
        op = dist.ReduceOp.SUM if mean or word == "sum" else word
        if isinstance(op, str):
            op = getattr(dist.ReduceOp, op.upper())
        out = tensor.to(self.root_device, torch.float32 if mean and not tensor.is_floating_point() else None, copy=True)
        dist.all_reduce(out, op, group=group)
        return out / dist.get_world_size(group) if mean else out

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """tensor [...] on each rank -> [ranks, ...]; differentiable with `sync_grads`."""
        if not dist.is_initialized():
            return tensor
        if group not in (None, dist.group.WORLD):
            raise ValueError("ZeroFnStrategy: all_gather over a group is not supported. Leave group out.")
        return zerofn.collectives.all_gather((tensor if sync_grads else tensor.detach())[None])
