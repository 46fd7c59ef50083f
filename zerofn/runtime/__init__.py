"""The run of a scheduled graph: backends, inputs and outputs, buffers."""
