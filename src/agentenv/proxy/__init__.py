"""Sandbox traffic: which sandbox and port a request is for, may it pass, stream it."""
