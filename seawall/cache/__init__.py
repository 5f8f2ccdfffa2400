"""Who owns which KV page: the page ledger, prefix caches and leases. Host side only, no tensors."""
