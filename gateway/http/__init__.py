"""The HTTP front: the OpenAI dialect over gateway/service.py, for clients that need to work unchanged."""
