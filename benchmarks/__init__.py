"""Measurements, beside other trainers: benchmarks/RESULTS.md."""
