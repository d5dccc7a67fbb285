"""Benchmarks: run from the checkout, `python -m benchmarks.NAME`. Each writes JSON into benchmarks/results."""
