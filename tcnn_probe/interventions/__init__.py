"""Interventions on heads, to see what they cause."""
