"""AgentENV: real Linux computers for AI agents, driven by the E2B SDKs.

This package is the control plane. What runs inside a virtual machine is the Rust program in `crates/guest`.
"""

__version__ = "0.1.0"
