"""Benchmarks: `python -m bench.NAME --json OUT` writes one report (format in `bench.report`)."""
