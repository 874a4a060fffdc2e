"""The labeling server: pages for labelers and leads, and an HTTP API."""
