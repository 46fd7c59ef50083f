"""State that lies in host memory or on drives."""
