"""Parts of a step that a compiler fuses."""
