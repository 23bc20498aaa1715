"""Requests and their samples, and who takes part in the next forward."""
