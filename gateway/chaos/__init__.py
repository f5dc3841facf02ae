"""A storm over rings that serve, and the proof that no stream noticed more than a pause."""
