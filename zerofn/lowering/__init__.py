"""Parts of a step that a compiler fuses, or that a device repeats alone."""
