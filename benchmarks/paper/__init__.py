"""The tables of `benchmarks.reproduce`, a module each."""
