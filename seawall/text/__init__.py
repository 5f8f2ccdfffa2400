"""Text at the edge: tokenizer, chat template, incremental decoding and stop strings; no torch."""
