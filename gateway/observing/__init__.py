"""What an operator sees of turns and rings: metrics, logs, traces, the last turns."""
