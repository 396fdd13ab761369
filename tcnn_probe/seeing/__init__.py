"""Seeing what runs inside somebody else's model, without touching it."""
