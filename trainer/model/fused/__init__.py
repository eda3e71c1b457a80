"""The trainer's own functions for adapted layers."""
