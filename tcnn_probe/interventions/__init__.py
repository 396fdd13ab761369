"""What is done to heads to see what they cause."""
