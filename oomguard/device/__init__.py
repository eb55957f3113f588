"""What memory this process may use, and who says so: the only readers of /proc, cgroups, rlimits and NVML."""
