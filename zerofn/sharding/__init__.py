"""Sharding: codecs, the `Sharded` tree node, transfers of what is cut, gather and scatter, `shard` and `unshard`."""
