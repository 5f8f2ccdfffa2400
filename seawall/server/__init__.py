"""The HTTP front end: parses, detokenises and answers; the engine is another process."""
