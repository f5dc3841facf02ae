"""PRETENDS: the same ring without a model, seeded, with scripted faults and a virtual clock."""
