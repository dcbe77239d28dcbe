"""Sandbox traffic: which sandbox and port a request is for, may it pass, stream it."""

from agentenv.proxy.app import UVICORN_OPTIONS, SandboxProxy

__all__ = ["UVICORN_OPTIONS", "SandboxProxy"]
