"""Building blocks of a decoder: plain classes that hold tensors."""
