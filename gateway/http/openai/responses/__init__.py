"""OpenAI's responses: what comes in as items, and what goes out as items and events."""
