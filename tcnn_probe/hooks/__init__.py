"""Following a forward of a user's model without changing it,
with hooks, function modes and dispatch modes.
"""
