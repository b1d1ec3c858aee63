"""A node in a virtual machine: an ostree-booted Debian under QEMU, with mcdaemon installed as on any node.

Modules, from the bottom: what a disk is made of (`image`), a process that runs it (`qemu`), its boot loader
(`bootloader`), how to talk to what runs in it (`guest`), and the node that scenarios are written with (`node`).
"""
