"""The client of the guest agent, and the making of guest assets (kernel, initramfs, base root file system)."""
