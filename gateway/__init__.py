"""SPEAKS: turns gRPC and text into typed requests, and events into text; the composition root and the CLI."""
