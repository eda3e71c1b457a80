"""The plan: what a run will need, before any weight."""
