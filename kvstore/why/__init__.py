"""Where the match of a prompt ends, and why."""
