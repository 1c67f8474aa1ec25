"""Results to text, JSON, CSV, HTML and timelines; formatting only."""
