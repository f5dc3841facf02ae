"""GENERATED from proto/ by `make proto`; nothing here is edited by hand."""
