"""Turn the user's step into one graph. Refuse a step whose graph would be wrong, and say what to write instead.

Words:

- *capture*: run `step(state, batch)` once on fake tensors and record its operations: forward, backward and update in
  one FX graph (`capture.py`).
- *known value*: a value that follows from sizes alone, so that it is the same in every step (`known_values.py`).
- *opaque node*: a call that is not traced, `zerofn.eager_region`.

How a step is captured: `compile` and `plan` call `checked_capture.py`. `capture.py` traces with make_fx, through
`zerofn.tracing`. `loop.py` makes one node of a loop over microbatches. `verify.py` checks that the graph is a pure
function and that its results do not depend on how the state is sharded. `between_ranks.py` and `unsummed.py` find
values that would make ranks differ. If any of these refuses the step, it is captured once more with the lines of the
user's code, only for the error: recording lines makes a capture up to half as slow again. `advice.py` adds what to
write instead.

Invariants:

- `train_step` gives the same bits eagerly and compiled.
- Values that change the state are the same on all ranks, or a rank's part of one value. The gradient of a `psum` must
  be the same on all ranks of its axis, and so must the loss along `tensor`. Shards, and noise in their shape
  (`normal_like`), are parts of one value. A step that updates a whole leaf with values of one rank's slices, before
  their sum, is refused; `unsummed.py` names the leaf and the word of the plan that it lacks.
- Objects that move when they are read, such as generators and iterators, are refused (`changing_constants.py`).

Choices:

- Libraries that ask `torch.compiler.is_compiling()` first get the answer no, because some models otherwise choose
  another algorithm, with other rounding. Only a model that cannot be traced in this way is traced again with yes.
- Traced tensors have no values. So transformers could not see that its positions are a plain range: it would mask all
  pairs of tokens and repeat grouped heads, with other rounding than eagerly, an L x L mask in each layer and no flash
  kernel. If code asks for a value that depends on no input (`bool`, `.item()`, `torch.equal`), we run its nodes once
  on the CPU. `transformers`' `is_tracing(x)` answers no for it. So models decide as they do eagerly.
- Masks are recognised before torch chooses a kernel (`attention_masks.py`). A mask takes that choice away, computes
  the half that a triangle would skip, and is saved for the backward pass. So `scaled_dot_product_attention` looks at
  a mask of known value, and calls torch with `is_causal`, with a window of CUDA's flash kernel, or with one mask for
  all rows. A known triangle with the padding of each row becomes `is_causal` and a bias [B, 1, 1, L]. On the CPU that
  has the mask's bits, since hidden pairs add zeros. A later change of the graph would have to replace the forward
  pass, the backward pass and the saved activations.
- A mask that hides most pairs is taken apart by how it was made (`sparse_masks.py`). Its value depends on the batch,
  but its nodes show that it is a conjunction. A comparison of positions in the row is a band of a layout, at any
  length; other rules of positions have a known value. `number[:, :, None] == number[:, None]` of a cumulative sum of
  booleans is documents: the numbers never decrease, so a search finds each query's span. transformers compares
  position ids (`kv_position <= q_position`), which are the same comparison in a document whose position ids go on by
  one, so we look for that difference behind the sum. Views and indices are followed by moving numbers of elements
  through them (`moved_elements.py`). If one factor is not understood, the mask stays. The operation rounds
  differently from torch's kernel, so short rows, and masks that hide little, keep torch's bits.
- Sizes that depend on data are computed by the graph. Passes and plans use the upper bounds of torch's fake kernels:
  100 rows for `h[mask]` with a mask of 100 (`data_sizes.py`).
- Checks of libraries that read data only to raise an error are answered so that they pass (`host_checks.py`).

Start reading: `capture.py`, then `verify.py`.
"""
