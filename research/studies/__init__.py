"""Tests of published findings in the playground world."""
