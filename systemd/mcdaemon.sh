#!/bin/sh
# The agent's command line. -I: no PYTHON* variable, user site or working directory decides what root imports.
# -B: no byte code beside the host's modules.
exec /usr/bin/python3 -IB /usr/local/lib/mcdaemon/mcdaemon.pyz "$@"
