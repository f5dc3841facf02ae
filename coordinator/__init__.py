"""DECIDES: sessions, lanes, ledger, plans, scheduling, acceptance. No torch, no ray, no grpc."""
