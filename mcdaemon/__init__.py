"""mcdaemon: brings a RHEL CoreOS or Fedora CoreOS node to its MachineConfig."""

__version__ = "0.1.0"
