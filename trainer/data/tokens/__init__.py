"""Token ids, stored and cached."""
