"""Engines that sample from a copy of the policy, behind one protocol, and the test that each must pass."""
