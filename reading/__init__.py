"""Rows of files, folders and hub ids, and their fields, with errors that name file, line and field. No torch."""
