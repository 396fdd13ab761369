"""What the studies share: data, options, output folders."""
