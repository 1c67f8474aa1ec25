"""Loaded by the interpreter of every Python process under ``fsdp2prof record``."""
