"""What a store says of itself: snapshots, Prometheus text, events, a file for other processes."""
