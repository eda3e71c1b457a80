"""One run from its configuration to its result: prepare, train, export."""
