"""What several benchmarks share: processes, counters, statistics, tables, the models and the systems beside."""
