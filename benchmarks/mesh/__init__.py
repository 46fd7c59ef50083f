"""Meshes: tensor and context parallelism beside the systems that have them."""
