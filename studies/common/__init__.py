"""Shared parts of the studies: data, options, output folders, figures."""
