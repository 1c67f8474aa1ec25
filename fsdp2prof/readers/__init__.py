"""Files to tables: Kineto traces, allocator snapshots, run directories."""
