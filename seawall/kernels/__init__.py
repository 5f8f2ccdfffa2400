"""Numeric kernels and their slow twins."""
