"""Attention by layouts beside dense attention: time and memory over length and density."""
