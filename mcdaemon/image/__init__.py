"""Answers which sources hold an image completely, before anything on the node depends on it."""
