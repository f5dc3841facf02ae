"""Who may come in, and how much of it: keys, TLS, limits."""
