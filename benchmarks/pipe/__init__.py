"""Pipelines: schedules simulated, beside torch.distributed.pipelining's."""
