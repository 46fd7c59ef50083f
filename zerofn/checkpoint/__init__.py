"""Checkpoints: a folder with one safetensors file per rank and a JSON manifest of logical names.

`tensor_file` is the file format, `manifest` says what is in which file, `folder` makes a checkpoint appear at once.
Each of the public functions has a file of its own.
"""

from ..util.errors import CheckpointError as CheckpointError
from .exporting import export as export
from .loading import load as load
from .pretrained import load_safetensors as load_safetensors
from .saving import save as save
from .state_dict import load_state_dict as load_state_dict
from .verifying import verify as verify
