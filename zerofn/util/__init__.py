"""Small helpers without torch.fx and without state: errors that name their place, sizes in words, patches."""
