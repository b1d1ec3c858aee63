"""What runs first in the zipapp. It must compile on older interpreters too, to be able to refuse them in words."""

import sys

if sys.hexversion < 0x03090000:
    sys.exit(
        "cannot run on this Python: mcdaemon needs 3.9 or newer, this is " + sys.version.split()[0] + " "
        "(RHEL CoreOS 4.17 and later carry one; other images need a layer with it)"
    )

from mcdaemon.cli import main

sys.exit(main())
