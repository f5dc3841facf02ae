"""A slice of a transformers decoder: how it is cut out, loaded and called."""
