"""Text and chat messages on one side, token ids on the other. Knows no wire format and no ring."""
