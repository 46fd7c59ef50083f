"""One rank of the demo GPT (`examples/gpt.py`) with and without codecs, in a process that stays.

quality.py starts it: python -m benchmarks.wire.gpt_rank --rank R --world N --port P --folder F, and where rank 0 is.
"begin" reads the tokens; "train" trains a row; "ready" has one begin anew, and "time" times steps of it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.common.processes import HERE
from benchmarks.wire.curves import BESIDE, POWER_SGD, first_compressed
from benchmarks.wire.rows import FIRST_COMPRESSED, WAYS, in_ddp, in_power_sgd
from benchmarks.wire.staying import WARMUP_STEPS, Answer, Transport, answer_lines, joined, turn

BETAS, DECAY, MAX_NORM = (0.9, 0.95), 0.1, 1.0  # the example's own


def example(folder: Path, num_steps: int) -> tuple[ModuleType, argparse.Namespace]:
    """`examples/gpt.py`, and its own options."""
    spec = importlib.util.spec_from_file_location("gpt", HERE.parent / "examples" / "gpt.py")
    assert spec is not None and spec.loader is not None
    gpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpt)
    sys.argv = ["gpt.py", "--out", str(folder), "--steps", str(num_steps)]
    return gpt, gpt.options()


class Ours:
    """The example's steps, as it compiles them, with a codec."""

    def __init__(self, gpt: ModuleType, args: argparse.Namespace, row: str) -> None:
        import zerofn

        self._init, self._train_step, evaluate, _ = gpt.make_steps(args)
        self._way, self._compiled = WAYS[row], functools.cache(zerofn.compile)
        self._evaluate, self._transport = zerofn.compile(evaluate), Transport()

    def begin(self, first: int) -> None:
        """`first`: see `first_compressed`."""
        begin, step = self._way.applied(self._init, self._train_step, first)
        self._state, self._step = begin(), self._compiled(step)

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self._state, metrics = self._step(self._state, batch)
        return metrics["loss"]

    def settle(self) -> None:
        self._transport.settle()

    def evaluate(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._evaluate(self._state.params, batch) / dist.get_world_size()


class InDdp:
    """The same model, schedule and clipping in DDP with torch's AdamW."""

    def __init__(self, gpt: ModuleType, args: argparse.Namespace, row: str) -> None:
        from zerofn import optim

        self._gpt, self._args, self._hooked = gpt, args, row == POWER_SGD
        warmup = min(50, args.steps // 4)
        self._rate = optim.warmup_cosine_decay_schedule(0.0, args.learning_rate, warmup, args.steps, 1e-5)

    def begin(self, first: int) -> None:
        a = self._args
        torch.manual_seed(a.seed)
        module = self._gpt.GPT(a.vocab, a.context, a.layers, a.heads, a.width, a.dropout)
        self._model = in_power_sgd(module, first) if self._hooked else in_ddp(module)
        matrices, others = ([p for p in module.parameters() if (p.dim() > 1) == kind] for kind in (True, False))
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        self._optimizer, self._count = torch.optim.AdamW(groups, betas=BETAS, fused=True), 0

    def _loss(self, batch: dict[str, torch.Tensor], model: torch.nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(self._count)
        self._count += 1
        loss = self._loss(batch, self._model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def settle(self) -> None:
        pass

    @torch.no_grad()
    def evaluate(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self._loss(batch, self._model.module)
        dist.all_reduce(loss)
        return loss / dist.get_world_size()


class Rank:
    """What a rank has: tokens, and the rows that it has trained."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._gpt, self._args = example(options.folder, options.steps)
        self._rows: dict[str, Ours | InDdp] = {}

    def begin(self) -> Answer:
        """Read or make the tokens."""
        args, o = self._args, self.options
        _, self._train, held_out = self._gpt.prepare(args, o.rank, o.world)
        self._mine = slice(o.rank * args.batch // o.world, (o.rank + 1) * args.batch // o.world)
        spread = torch.linspace(0, len(held_out) - args.context - 1, args.eval_batches * args.batch).long()
        windows = (self._gpt.windows(held_out, s[self._mine], args.context) for s in spread.split(args.batch))
        self._held_out = list(windows)
        return {"train": len(self._train), "held out": len(held_out)}

    def _batch(self, number: int) -> dict[str, torch.Tensor]:
        """What the example's loader has for a step."""
        args = self._args
        generator = torch.Generator().manual_seed((args.seed << 40) + number * args.batch)
        starts = torch.randint(len(self._train) - args.context, (args.batch,), generator=generator)
        return self._gpt.windows(self._train, starts[self._mine], args.context)

    def _begun(self, row: str, seed: int, first: int) -> Ours | InDdp:
        """A row at its start. What it has compiled stays."""
        self._args.seed = seed
        if row not in self._rows:
            make: Callable[..., Ours | InDdp] = InDdp if row in BESIDE else Ours
            self._rows[row] = make(self._gpt, self._args, row)
        self._rows[row].begin(first)
        return self._rows[row]

    def train(self, row: str, seed: int) -> Answer:
        """[step, validation loss] on the way, and milliseconds of a step."""
        trained, validation, times = self._begun(row, seed, first_compressed(row, self._args.steps)), [], []
        for number in range(self._args.steps):
            start = time.perf_counter()
            float(trained.step(self._batch(number)))
            times.append(1e3 * (time.perf_counter() - start))
            if (number + 1) % self.options.every == 0 or number + 1 == self._args.steps:
                losses = [trained.evaluate(batch) for batch in self._held_out]
                validation.append([number + 1, torch.stack(losses).mean().item()])
        return {"validation": validation, "ms": statistics.median(times)}

    def ready(self, row: str) -> Answer:
        """Have a row begin, and compress at once."""
        trained = self._begun(row, 0, FIRST_COMPRESSED)
        for number in range(WARMUP_STEPS):
            trained.step(self._batch(number))
        trained.settle()
        return {}

    def time(self, row: str, num: int) -> Answer:
        """Milliseconds and bytes of a step, of a row that is ready."""
        trained, batch = self._rows[row], self._batch(0)

        def steps() -> None:
            for _ in range(num):
                trained.step(batch)
            trained.settle()

        return turn(steps, num, self.options.interface)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("steps", "every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where tokens lie")
    rank = Rank(joined(parser))
    answer_lines({"begin": rank.begin, "train": rank.train, "ready": rank.ready, "time": rank.time})


if __name__ == "__main__":
    main()
