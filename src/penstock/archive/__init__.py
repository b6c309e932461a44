"""Chunks at rest: the container every chunk's bytes pass through."""
