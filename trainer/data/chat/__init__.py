"""Rows become messages, and messages token ids with labels."""
