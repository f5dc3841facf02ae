"""COMPUTES: one slice of a model with its static KV rows, and the rings made of such slices."""
