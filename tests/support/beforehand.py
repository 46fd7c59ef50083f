"""What processes that tests fork would each import, and make, for themselves: it is there before they are forked."""

from __future__ import annotations

import importlib
import sys
import warnings

import zerofn

# What a rank would import for its first step, and for its first model: a thousand modules, in seconds.
FIRST = ("zerofn.compile", "torch._dynamo", "transformers.models.llama.modeling_llama")
# What several tests of a whole run import later, each time in a process of their own.
LATER = (
    "torch._decomp.decompositions_for_jvp",
    "torch._inductor.compile_fx",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama4.modeling_llama4",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "transformers.models.roberta.modeling_roberta",
    "transformers.models.t5.modeling_t5",
)


def bring(whole: bool) -> None:
    """Import modules of libraries that tests have imported. `whole`: for many tests, which need more of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own imports warn of each other
        for name in (*FIRST, *(LATER if whole else ())):
            if name.split(".")[0] in sys.modules:
                importlib.import_module(name)
    if whole:
        _step()


def _step() -> None:
    """Capture as a process's first steps do, for which torch makes tables and symbols. It starts no threads."""
    from tests.support.small_steps import batch_of, build, loss_of, state_of, step_with

    module = build()
    loss_of_all = loss_of(module)

    def with_some(params, batch):  # a size that depends on data: torch calculates with symbols
        return loss_of_all(params, batch) + batch["x"][batch["y"] > 0].square().mean()

    for loss_fn, num_microbatches in ((loss_of_all, 2), (with_some, 1)):
        zerofn.compile(step_with(loss_fn, num_microbatches)).lower(state_of(module, 3), batch_of())
