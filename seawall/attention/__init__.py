"""Attention over the KV pool: what a step asks, and the backends that answer."""
