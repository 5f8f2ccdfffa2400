"""Measurements through the public API: offline throughput, and a comparison on one CPU."""
