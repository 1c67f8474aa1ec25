"""Techniques of training beyond plain FSDP2, a room each: what they refuse, change and assume."""
