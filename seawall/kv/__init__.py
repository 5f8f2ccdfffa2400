"""The KV pool: keys and values of every layer, in pages."""
