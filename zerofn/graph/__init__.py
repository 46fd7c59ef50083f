"""The captured step as a graph: its program, bodies, aliasing, liveness, edits, and what its values depend on."""
