"""Models: the decoder of the native families, the transformers path, and weight loading."""
