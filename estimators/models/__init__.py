"""Models on the meta device: built-in families, Hugging Face configurations, factories."""
