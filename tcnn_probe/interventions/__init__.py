"""Interventions on attention heads, which show the effect of heads on a model."""
