"""The composition root and the loop that drives scheduler and runner."""
