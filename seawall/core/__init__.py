"""Values and vocabulary shared by every package: config, params, requests, steps, errors."""
