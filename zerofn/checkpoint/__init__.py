"""Checkpoints: a folder with one safetensors file per rank and a JSON manifest of logical names.

`tensor_file` is the format, `manifest` what lies where, `folder` how a checkpoint comes to be at once; the
four public functions each have a file of their own.
"""

from ..util.errors import CheckpointError as CheckpointError
from .exporting import export as export
from .loading import load as load
from .pretrained import load_safetensors as load_safetensors
from .saving import save as save
