"""Runs planned steps on the device: buffers, forward, sampling, results."""
