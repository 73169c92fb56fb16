"""Leyline: an inference engine for MLA models whose cached context can be edited in the middle."""

from __future__ import annotations

__version__ = "0.1.0"
