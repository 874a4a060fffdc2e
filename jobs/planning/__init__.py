"""A job in numbers before it runs."""
