"""What a stage keeps of the tokens it has seen. Bytes only: which rows are valid is the ledger's business."""
