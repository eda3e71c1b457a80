"""What the device is and holds."""
