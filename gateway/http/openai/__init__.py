"""OpenAI's dialect: chat, plain completions, responses, models."""
