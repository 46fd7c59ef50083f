"""What a captured step depends on outside its arguments, read so that a change is seen at the next call."""
