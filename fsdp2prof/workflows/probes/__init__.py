"""Programs that run in separate processes to check a job before it trains."""
