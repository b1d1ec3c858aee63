"""The node's private system bus: configuration of a real dbus-daemon, and waiting until it listens."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOCKET = "/run/dbus/system_bus_socket"
ADDRESS = f"unix:path={SOCKET}"

# Only root is on the node, and what a service may own or call is not what the stand tests; hence one open policy.
# The limits are those of the real system bus: a client that leaks match rules or calls must meet them here too.
CONFIGURATION = f"""<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>{ADDRESS}</listen>
  <servicedir>/run/dbus/services</servicedir>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_destination="*" eavesdrop="false"/>
    <allow receive_sender="*" eavesdrop="false"/>
    <allow send_type="method_call"/>
    <allow send_type="signal"/>
    <allow send_requested_reply="true" send_type="method_return"/>
    <allow send_requested_reply="true" send_type="error"/>
  </policy>
  <limit name="max_match_rules_per_connection">512</limit>
  <limit name="max_replies_per_connection">512</limit>
</busconfig>
"""


def start(folder: Path, services: Mapping[str, str], log: int, timeout: float = 10.0) -> subprocess.Popen[bytes]:
    """Start the bus with its configuration in `folder`, output to the descriptor `log`; it listens on return.

    `services` maps bus names to the units that the bus asks systemd to start when somebody calls the name.
    Raises TimeoutError when it does not listen within `timeout` seconds and RuntimeError when it ends at once.
    """
    configuration = folder / "system.conf"
    configuration.write_text(CONFIGURATION)
    (folder / "services").mkdir(exist_ok=True)
    for name, unit in services.items():
        text = f"[D-BUS Service]\nName={name}\nExec=/bin/false\nUser=root\nSystemdService={unit}\n"
        (folder / "services" / f"{name}.service").write_text(text)
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            ["dbus-daemon", f"--config-file={configuration}", "--nofork", "--nopidfile", "--systemd-activation",
             f"--print-address={writer}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(writer,),
        )  # fmt: skip
    finally:
        os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], timeout)
        if not ready:
            process.kill()
            raise TimeoutError(f"dbus-daemon does not listen on {SOCKET} after {timeout:g} s")
        if not os.read(reader, 4096):
            raise RuntimeError(f"dbus-daemon ended before it listened (status {process.wait(timeout)}); see its log")
    finally:
        os.close(reader)
    return process
