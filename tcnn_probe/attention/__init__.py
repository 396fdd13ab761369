"""Attention of any model, seen while it runs: rebuilt from what torch was asked for, on its grid, and measured."""
