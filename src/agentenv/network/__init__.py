"""Network slots, egress policy (nftables) and DNS for guests."""
