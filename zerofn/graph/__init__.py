"""The captured step: capture, aliasing, liveness, edits and checks of its graph."""
