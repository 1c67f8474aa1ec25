"""Techniques of training beyond plain FSDP2, one package or module each: what they refuse, change and
assume."""
