"""From what callers give to token ids, and from token ids to text."""
