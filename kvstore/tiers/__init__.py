"""The tiers: memory pools (device, host) and the disk tier behind its threads."""
