"""Update rules, reductions and copies on flat buffers: each is an operation `zerofn::name`, so one node of a graph.

`ops/` is a folder beside `zerofn/`, and is imported as `zerofn.ops`. `csrc/` has the C++ and CUDA sources: the
arithmetic of one element (`csrc/rules.h`, `csrc/formats.h`), the loops of the CPU library and those of CUDA.

Words:

- *traits*: the properties that an operation declares when it is defined (`registry.py`): whether it may work on a
  shard, which arguments it reads, writes and waits for, its flops. Passes and checks ask for traits, and have no
  tables of operations of their own.
- *rule*: the arithmetic of one optimizer update.
- *codec*: how a shard is stored (`codecs.py`): plainly, as two halves, or in 8-bit or float8 blocks. A codec is
  declared once, with the operations that encode and decode.
- *library*, *reference*: the compiled CPU kernels (`native.py`, `cpu.py`), and the same arithmetic in torch's
  operations (`reference.py`). Both give the same bits. `zerofn.ops.cpu.missing()` says why the library is not used.

How an update is made: `csrc/rules.h` has one element's arithmetic. The list `ZF_RULES` makes the loops of the CPU
library (AVX-512, AVX2 or plain C, chosen at run time) and of CUDA from it. `ops/<name>.py` declares the number, the
schema and the reference of the rule with `define_rule`. A new rule needs these two, and an optimizer in
`zerofn.optim` that calls it.

GPU kernels (`csrc/cuda.cu`, `cuda.py`) share their arithmetic with the CPU's. They compile without a warning for
sm_70, 75, 80, 86, 89, 90, 100 and 120. Compiled as C++ and run thread by thread on the CPU, they give the bits of
torch's operations; tests do that, and the same tests run on a GPU if the machine has one.

Invariants and choices:

- Every machine gives the same bits: no fast-math, and no contraction except the fused multiply-adds that are written.
  The number of threads and the instruction set change nothing.
- Speed: streams of 16 bits are prefetched into the second cache, because the first one can wait for two dozen lines
  only.
- AdamW gives the bits of torch's fused kernel, also in the last elements of a tensor, which torch rounds differently.
  Runs of elements end where padding begins, so the last elements are the same ones as in plain torch.
- Lossy moments (bfloat16, 8-bit, float8) are rounded stochastically, by a hash of the number of updates and the
  element's position in its unit. Rounded to nearest, a second moment that decays by a thousandth a step would never
  fall. Blocks of 256 elements begin at fixed positions of the unit, so they do not move with the number of ranks.
  Scales are powers of two, so decoded numbers encode to themselves.
- Signs of 1-bit optimizers are values of the graph (`sign_sums.py`): an all-to-all and an all-gather send them as
  they are, and each operation between two transfers reads memory once. On two ranks at stage 0 a coded step reads and
  writes 42 bytes a parameter, 14 more than AdamW.

Logits in tiles (`head_loss.py`): the loss and the gradient of the head's input need whole rows of logits, so they use
tiles of tokens. The gradient of the head's weight sums over tokens, so it uses tiles of the vocabulary, each for all
tokens. No sum is cut, so the bits stay. For the second kind of tile, the largest logit of each row and the logarithm of
its sum come from the first. A single pass over tiles of tokens would save one product in five, but would add up the
head's gradient in another order. The details:

- Subtractions follow the order of torch's kernel, and torch's own kernel computes the exponential function. If
  log-probabilities are in half precision, torch's kernel on the host rounds the logarithm before the subtraction, so
  we read it from the log-probability of the largest logit. Devices subtract in float32.
- A number of a product must not depend on how many rows or columns the product has. On the host that holds in
  float32, bfloat16 and float16 for tiles of multiples of 256 whose last one is not smaller (tried on some 1,000
  random shapes, with 1 and 2 threads). It fails for narrower tiles and for float64, so neither is offered. cuBLAS
  promises nothing, so on devices tiles may change the last bits.
- The sizes of tiles follow from the shape alone; nothing is measured at run time.

Attention of blocks (`block_attention.py`, `csrc/attention.cpp`): one operation for all layouts of `zerofn.sparse`.
The kernel holds scores as [keys, queries], so that a query's largest score, its sum and its mask are arithmetic of
whole vectors. Keys and values are read in place, one number at a time beside vectors of queries. Its products take
less time than those of torch's flash kernel, so that kernel is not used. Each sum has one order, so instruction sets
and numbers of threads give the same bits. On a GPU, `attention_flex.py` turns a layout into the blocks of torch's
FlexAttention, whose kernels use tensor cores; one of our own would have to reach them on each architecture.

Start reading: `registry.py`, then `update_rule.py` and one of the optimizers' rules.
"""
