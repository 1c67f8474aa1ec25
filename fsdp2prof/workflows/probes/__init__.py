"""What runs in processes of its own to check a job before it trains."""
