"""Callbacks that record in other training loops;
each module needs the package that it is named after.
"""
