"""Prometheus metrics: what is counted, by whom, and how it is read."""
