"""MachineConfigs as data: read, merged, compared, judged. No input or output of any kind happens in this package."""
