"""The policies of a comparison: local models, models behind an endpoint, saved outputs."""
