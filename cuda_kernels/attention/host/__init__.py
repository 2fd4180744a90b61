"""Host code of the attention kernels: tables, tensor maps and launches."""
