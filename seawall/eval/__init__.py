"""The engine as a model of lm-evaluation-harness; importing this package needs no harness."""
