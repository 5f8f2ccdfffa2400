"""What touches the device: the runtime, the arena of long-lived tensors and the byte meters."""
