"""Parts of a scheduled step that a compiler fuses (regions), or that a device replays alone (segments of CUDA graphs).

Words:

- *region*: the operations between two products or transfers, as a body that torch's Inductor compiles
  (`outline_regions.py`).
- *segment*: a run of operations of a scheduled graph that need nothing of the host (`segments.py`).
- *recording*: a CUDA graph of one segment (`cuda_graphs.py`).

Regions (`backend="inductor"`): the pass `outline_regions` runs before transfers are placed and before memory is
reused. So regions follow from the mathematics alone: their texts are the same at every stage, and equal layers share
them. Batch norm first becomes an operation that returns its running values, which are copied to their place later, so
that a region computes without writing. An operation that compilers round in their own way, such as `gelu`, is a
region even alone, because recomputation may put it among others. So stages, `remat` and budgets have one another's
bits.

- Plans need no compiler. They count a region's inputs and results as alive at once, since a fused kernel reads the
  one and writes the other. Its time is one pass over both; on a measured machine where a step runs the region
  compiled, it is measured like any operation.
- A compiled region is a file, named by its text, the compiler's options and the versions of torch and of the devices
  (`regions.py`). The first process of a host that needs a region makes its file while others wait; a file gets its
  name when it is complete. The region is then run on zeros, and the most that allocators hand out meanwhile is
  compared with the plan of the region alone.
- A region that takes more memory, or fails, runs operation by operation at every stage and budget, so that these keep
  one another's bits. After a step is bound, ranks exchange the names of such regions and leave out whatever any of
  them leaves out.
- `backend="auto"` (`auto.py`, `aside.py`) compiles in another process, while the step runs without regions. Ranks
  agree through the job's store on the call from which they run regions compiled, and on which ones: those that all of
  them have.

CUDA graphs (`backend="graphs"`): a graph replays kernels with the addresses and numbers of its recording.

- `segments.py` cuts the scheduled graph. The starts and waits of transfers, offloading, questions about values and
  draws from torch's default generator stay between segments, in their order. Without any of these the whole step is
  one segment; a loop that contains one is cut inside. Scalars in host memory (keys, the step's number, schedules) are
  computed first, and enter a segment as scalars on the device.
- Inputs of two kinds enter a segment. State, gathered units and buckets in static buffers, and results of other
  segments keep their address. Other values (the batch, results of transfers) are copied into memory of the recording.
  Each draw has a generator that is seeded before a replay. Results of the step are copied out.
- All segments of a step are recorded during one call, and each is replayed at once, so that the operations between
  them have values. A recording does not hold the memory of its results: once the step has read a value for the last
  time, later segments reuse its memory, in that call and so in every later one. Another state, or a static buffer
  that has moved, leads to a new recording of all segments.
- Nothing is computed while recording, so a recording that fails loses nothing: the step then runs operation by
  operation, and the log says why.

Start reading: `outline_regions.py`, then `segments.py`.
"""
