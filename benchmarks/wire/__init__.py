"""What ranks send in fewer bits: how fast it is coded, what it gains on slow links, and what it does to the loss."""
