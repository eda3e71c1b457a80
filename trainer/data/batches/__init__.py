"""Token ids become micro-batches."""
