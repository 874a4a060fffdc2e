"""Worlds outside of the product, named in a job by path: film reviews and translations."""
