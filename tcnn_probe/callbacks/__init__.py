"""Recording while somebody else's loop trains: each module here needs the package that it is named after."""
