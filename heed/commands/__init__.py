"""The commands of `heed`, one module per command or group. Imports of torch and ray stay inside functions."""
