"""Interventions on attention heads, which show what the heads cause."""
