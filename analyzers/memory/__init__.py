"""Contents of a device's memory at its peak, by layer, phase and kind; out of memory, leaks,
fragmentation."""
