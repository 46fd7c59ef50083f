"""Layers and sequences that are cut over a mesh, in unmodified models: tensor, context and pipeline parallelism.

Words:

- *plan of slices*: words such as "colwise" for the layers of a model, transformers' `tp_plan` (`plan.py`).
- *chunk*: one of several equal parts of a sequence. By default each of n ranks along `context` has two of 2n chunks, an
  early and a late one, so that all have equal work under a causal mask (`chunks.py`).
- *twin*: a small model of the same class, in float64 (`small_twin.py`).

Along `tensor` (`tensor_parallel.py`): a rank's weights are slices. A layer that is cut by columns gets `vary` before
it, and one that is cut by rows `psum` after it. The module changes only in the forward of the layers that the plan
names.

- If several cut layers of a module read one input (q, k and v), `vary` is applied to that input once, so its gradient
  is all-reduced once instead of three times (`shared_inputs.py`).
- A weight that two modules share (a tied embedding) is cut for both, or refused.
- In layers that are `sequence_parallel` a rank has a part of the tokens, and the two maps are an all-gather and a
  reduce-scatter. The gathered tokens are not saved, but gathered again in the backward pass (`sequence_parallel.py`).
- If a layer wants all features and gets one rank's part, torch's error becomes a sentence about the plan
  (`plan_errors.py`).

Along `context` (`context.py`, `attention.py`): ranks have parts of the same rows. In attention, tokens meet: by two
exchanges of heads for sequences and back (Ulysses), or by blocks of keys and values that travel around a ring. With a
layout of `zerofn.sparse`, every rank knows which blocks of keys all others need, because the pattern is known at
capture. So one exchange of parts of unequal sizes brings them (`key_blocks.py`, `zerofn/comm/exchange_parts.py`); its
table of sizes is the same argument on all ranks, and fingerprints compare it. One call of attention then uses all
keys. We do not merge blocks by logsumexp as they arrive: one call has one order of sums, and takes no more memory,
since the keys are saved for the backward pass anyway. `sparse.part.OfPart` asks the pattern about the positions of a
rank's queries and keys in the whole sequence. Documents of a batch are spans of positions, and do not change what
travels. Which rank has which chunks is an explicit value that `split_sequence` and attention both get. It must be the
same for all layers and on all ranks, so it may not depend on a measured machine.

Along `pipe` (`pipe.py`): a leaf is on one stage, or on the stages that read it. Before its use it is sent to all, so
a step is right on such a mesh as it is written. A pipeline is this step, cut (`zerofn.passes.cut_stages`): every rank
has captured the whole microbatch, so draws, weights of the loss, checks and aux mean the same on all ranks.
`model_parts.py` finds the parts of a model and what each costs.

How a plan is tried: a twin computes rows in parts and as a whole, before the model is changed. For `context` that
shows whether tokens meet anywhere but in attention (`check_context.py`); for `tensor` whether the user's plan of
slices is right (`check_plan.py`). The ranks of a twin run one after another in this process: a rank that needs a
value which another one has not sent is run again later (`local_ranks.py`).

Start reading: `tensor_parallel.py`, then `attention.py` and `pipe.py`.
"""

from typing import TYPE_CHECKING

from ..util.names import of_package
from .attention import attention
from .balance import balanced_chunks
from .chunks import Chunks
from .context import context
from .cross_entropy import cross_entropy
from .pipe import pipe
from .plan import Slice
from .sequence import split_sequence
from .tensor_parallel import tensor
from .tiled_loss import tiled_loss

__all__ = [
    "attention",
    "balanced_chunks",
    "context",
    "cross_entropy",
    "pipe",
    "split_sequence",
    "tensor",
    "tiled_loss",
    "Chunks",
    "Slice",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = of_package(__name__, __all__)
