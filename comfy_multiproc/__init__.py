"""Memory management of ComfyUI across processes: the runtime, the fork and its commands."""

__version__ = "0.1.0"
