"""Disks of sandboxes."""
