"""Units."""

GIB = 2**30
"""bytes in a GiB; GB is never printed but in the textbook's own accounting"""
