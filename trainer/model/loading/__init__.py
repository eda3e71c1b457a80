"""Weights: from a folder, the hub or a seed, quantised as they come."""
