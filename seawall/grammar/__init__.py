"""Structured output: grammars compiled in a bounded process, masks filled by threads."""
