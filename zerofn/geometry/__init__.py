"""Geometry: where each leaf of a tree lies, in slices, in units and in shards. Intervals only; nothing is sent."""
