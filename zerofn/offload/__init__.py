"""State in host memory or on drives."""
