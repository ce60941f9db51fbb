"""What travels between the parts, and its contract."""
