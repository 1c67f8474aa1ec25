"""What is done once a rank: read, cached, kept, put together, here or on a cluster."""
