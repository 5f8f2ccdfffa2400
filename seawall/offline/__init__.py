"""The public offline engine: generate and score in the caller's own process."""
