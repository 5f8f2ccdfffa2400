"""From hidden rows to logprobs and tokens, tile by tile: the logits matrix is never made."""
