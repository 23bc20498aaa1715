"""From a name to a model that runs on a paged cache, or to the reason why not."""
