"""The labeling server: pages for labelers and leads, an HTTP API, and its client."""
