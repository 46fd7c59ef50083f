"""Checkpoints: a folder with one safetensors file for each rank, and a JSON manifest of logical names.

Words:

- *manifest*: which logical leaf is where in which file, as JSON (`manifest.py`).
- *logical leaf*: a whole tensor of the state by its name, whatever ranks, stage or slices stored it.
- *location*: a folder, or anything that fsspec reaches, such as `s3://bucket/run` (`locations.py`).

How a save runs (`saving.py`): `save_plan.py` says which rank writes which elements. Each rank writes its file
(`tensor_file.py`), past the page cache, with four transfers in flight; whole pieces of the state are written from
where they are (`direct_io.py`). The manifest appears last. `save(wait=False)` copies this rank's part to host memory
at the speed of that memory, and a thread writes the copy and agrees with the threads of the other ranks
(`background_saves.py`).

How a load runs (`loading.py`): each rank reads only the elements of its own shards (`fill_shards.py`,
`file_sources.py`), whatever the mesh that saved. What two slices share is a few runs of elements, or many short ones
at equal distances, which are read several at a time with what is between them (`tensor_source.py`). On the mesh that
saved, a rank reads its own shards alone. `load(donate=True)`, which `restore_or` uses, reads into the old state's
memory, so the state is in memory once.

Each public function has a file of its own.

Invariants:

- A checkpoint is replaced by one rename, of its manifest (`folder.py`). A save writes files with a number of its own
  beside those of the old checkpoint. So no folder is renamed, no file of others is touched, and at no moment is the
  folder without a checkpoint.
- Every bit is under a checksum: the manifest holds its own SHA-256 and the CRC-32 of every file's header, and a
  header the CRC-32 of each block. So a rank verifies what it reads, and reads only its intervals.
- A checkpoint describes whole leaves. If ranks have slices, the manifest has a tree for each slice, with each leaf's
  whole shape and the intervals in it. Units are written without padding, and a part that several slices have is in
  one of them.
- Nothing is pickled.

Object stores rename nothing, and their objects appear whole. The beginning of a file holds the checksums of what
follows, so a rank reads its part twice there: for the checksums, then for the upload. The manifest is one put. Two
jobs cannot exclude each other in an object store. Of two locks written at one moment the later counts, and a save
looks once more before it writes its manifest, so one whole checkpoint remains.

Start reading: `manifest.py`, then `saving.py` and `loading.py`.
"""

from ..util.errors import CheckpointError as CheckpointError
from .exporting import export as export
from .loading import load as load
from .pretrained import load_safetensors as load_safetensors
from .saving import save as save
from .state_dict import load_state_dict as load_state_dict
from .verifying import verify as verify
