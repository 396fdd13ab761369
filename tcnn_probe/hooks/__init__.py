"""Following a forward of somebody else's model without changing it: hooks, function modes and dispatch modes."""
