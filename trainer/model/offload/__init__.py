"""What does not fit the device: frozen blocks streamed from host memory or disk, checkpoints kept in host memory."""
