"""Anthropic's dialect: messages, and how many tokens they have."""
