"""What prefill and loads cost, from steps that are needed and from a few that are not."""
