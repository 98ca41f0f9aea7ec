"""Codecs: pure functions that encode a version relative to another one."""
