"""The labeling page and its HTTP API."""
