"""What runs a scheduled graph."""
