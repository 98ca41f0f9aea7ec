"""JSONL files of prompts."""

import json


def write_rows(path, *rows):
    """Write rows, some perhaps as the text or bytes of a line, and return the path as text."""
    lines = [row if isinstance(row, (bytes, str)) else json.dumps(row) for row in rows]
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return str(path)
