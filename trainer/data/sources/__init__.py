"""Sources of data: bytes become rows."""
