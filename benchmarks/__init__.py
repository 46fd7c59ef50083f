"""Programs that measure. Each prints a table and writes JSON to `results`: `python -m benchmarks.step.step`."""
