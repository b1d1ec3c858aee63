"""Mechanisms on the node, one module per thing: roots, files, units, users, kernel arguments, packages, deployments.

Nothing in here decides anything. Every path goes through `root`, every write through `files`.
"""
