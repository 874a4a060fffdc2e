"""Measures as much of Heed as possible on a GPU that is available for fifteen minutes: `python run.py first`."""
