"""What to do about it: what-if, reports and ways out of memory."""
