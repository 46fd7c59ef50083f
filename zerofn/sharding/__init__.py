"""Sharding: layout, codecs, the `Sharded` tree node, gather and scatter, `shard` and `unshard`."""
