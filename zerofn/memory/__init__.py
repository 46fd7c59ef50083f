"""Memory of the process: the host's allocator, page-locked buffers, shared arenas, donated tensors, turns of threads.

Words:

- *arena*: memory that is allocated once and that all compiled steps of the process share (`arena.py`).
- *static buffer*: a place in an arena, [arena, first byte], which a pass gave to a short-lived value.
- *donated*: a tensor whose memory now belongs to the next state (`donation.py`). Using it raises an error.
- *turn*: the right to run a step, or to read a state beside it (`turns.py`).

Choices:

- Gathered units, gradient buckets and reads from drives get static buffers when the step is compiled, as registers
  are allocated. An allocator that serves units and activations in turn ends with holes that fit neither.
- Once a step was compiled for the host, malloc keeps what a step frees (`host_allocator.py`), as allocators of
  accelerators do. The next step uses the same pages; a new page costs a page fault. Before that, while states are
  made, large blocks are mapped one by one, or the heap would be full of holes. A process whose state is on drives
  returns freed memory to the system instead: malloc's holes took as much as the gradients.
- Host tensors of 4 MiB and more are in huge pages. An update reads and writes up to nine streams, and with small
  pages each of them would need another page every few hundred elements.

Invariants:

- A step writes into the old state's memory and into shared arenas. So one lock of the process orders steps, captures
  and whatever reads a state. A thread holds the lock, so a save inside a running step is distinguished from one
  beside it.
- This room does not know graphs: passes write requests (`zerofn/graph/buffers.py`), and `zerofn/runtime/buffers.py`
  allocates.

Start reading: `arena.py`, then `turns.py`.
"""
