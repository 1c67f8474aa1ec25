"""What fills a device at its peak, by layer, phase and kind; out of memory, leaks, fragmentation."""
