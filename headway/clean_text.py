"""Text on its way out of a process: its secrets are hidden, its control characters escaped.

Every message, record, log and page goes through `without_secrets`, and what a terminal, a page or a
label shows through `printable` too. A process knows as its secrets: variables of its environment
that are named as such or by `register`, passwords in addresses there, and the tokens that Hugging
Face, Ray and ~/.netrc keep in files.
"""

import base64
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

WORDS = frozenset(
    {"PASSPHRASE", "PASS", "PWD", "CREDENTIAL", "CREDENTIALS", "AUTH", "PAT", "DSN", "COOKIE"}
)
ENDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD")
"""Words, and ends of words, by which the name of a variable says that it holds a secret."""
PLACES = frozenset(["PATH", "FILE", "DIR", "MODE", "SOCK", "TYPE", "VARIABLE"])
"""Last words of names whose variables do not hold the secret itself."""
WORKING_FOLDERS = ("PWD", "OLDPWD")
SHORTEST = 6
"""Characters of a secret; a shorter value would be found in any text."""
SHORTEST_LINE = 16
"""Characters of a line of a secret that is hidden by itself, as logs are searched by lines."""
HIDDEN = "[hidden]"
REFRESH_SECONDS = 5.0
LARGEST_FILE = 1 << 16
PASSWORD = re.compile(r"://[^\s/@:'\"]{0,500}:([^\s/@'\"]{1,500})@")
PATTERNS = (
    ("://", r"(://)[^\s/@'\"<>]{1,1000}@", rf"\1{HIDDEN}@"),
    (
        "=",
        r"(?i)([?&;][\w.-]{0,40}(?:key|token|secret|passw(?:or)?d|signature|credential|auth)"
        r"[\w.-]{0,40}=)[^\s&#'\"<>]+",
        rf"\1{HIDDEN}",
    ),
    (
        "uthorization",
        r"(?i)(authorization['\"]?\s{0,3}[:=,]\s{0,3}(?:b?['\"])?)(?:\w{1,20} )?[^\s'\",]+",
        rf"\1{HIDDEN}",
    ),
    ("earer ", r"(?i)\b(bearer )[\w.~+/=-]{12,}", rf"\1{HIDDEN}"),
    ("hf_", r"\bhf_[A-Za-z0-9]{20,}", HIDDEN),
    ("sk-", r"\bsk-[\w-]{20,}", HIDDEN),
    ("gh", r"\bgh[pousr]_[A-Za-z0-9]{30,}", HIDDEN),
    ("AKIA", r"\bAKIA[0-9A-Z]{16}\b", HIDDEN),
)
"""Forms of secrets of which only the form is known: a text that is in each, the form, and what is
left of it."""

_registered: set[str] = set()
_seen: dict[str, str] = {}
"""Every secret that this process has had, with its name."""
_known: list[tuple[str, str]] = []
_known_until = 0.0


def register(names: Iterable[str]) -> None:
    """Take variables of the environment for secrets, whatever their names."""
    global _known_until
    _registered.update(names)
    _known_until = 0.0


def forget() -> None:
    """Forget every secret; those that are still in the environment are found again."""
    _registered.clear()
    _seen.clear()
    register([])


def is_secret(name: str) -> bool:
    """Return True for the name of an environment variable that holds a secret.

    Example:
        >>> [is_secret(name) for name in ("HF_TOKEN", "PGPASSWORD", "SSH_AUTH_SOCK", "MAX_TOKENS")]
        [True, True, False, False]
    """
    words = [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word]
    if not words or words[-1] in PLACES or name in WORKING_FOLDERS:
        return name in _registered
    return name in _registered or any(word in WORDS or word.endswith(ENDS) for word in words)


def without_secrets(text: str) -> str:
    """Hide the secrets of this process, and what has the form of a secret, in a text."""
    text = without_known_secrets(text)
    for part, form, left in PATTERNS:
        if part in text:
            text = re.sub(form, left, text)
    return text


def without_known_secrets(text: str) -> str:
    """Replace the secrets of this process in a text by their names."""
    global _known, _known_until
    now = time.monotonic()
    if now >= _known_until:
        _seen.update(_secrets(os.environ))
        _known, _known_until = [*forms_of(_seen)], now + REFRESH_SECONDS
    for secret, name in _known:
        if secret in text:
            text = text.replace(secret, f"[{name}]")
    return text


def without_secrets_in(value: Any) -> Any:
    """Return a value of JSON's types whose texts have no secrets."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {without_secrets_in(key): without_secrets_in(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets_in(part) for part in value]
    return value


def printable(text: str) -> str:
    r"""Escape what could act on a terminal or hide: all but letters, signs, spaces and newlines.

    Example:
        >>> printable("4\x1b[2J")
        '4\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of this process, each with the name that is shown instead."""
    secrets = {}
    for name, value in environment.items():
        if is_secret(name):
            secrets[value.strip()] = name
        elif "://" in value:
            secrets |= dict.fromkeys(PASSWORD.findall(value), name)
    for path, name in _files(environment):
        with suppress(OSError, ValueError), path.open() as file:
            text = file.read(LARGEST_FILE)
            netrc = name == ".netrc"
            passwords = re.findall(r"\bpassword\s+(\S+)", text) if netrc else [text.strip()]
            secrets |= dict.fromkeys(passwords, name)
    return {secret: name for secret, name in secrets.items() if len(secret) >= SHORTEST}


def _files(environment: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    home = Path(environment.get("HOME", "/"))
    hub = Path(environment.get("HF_HOME", home / ".cache" / "huggingface"))
    yield Path(environment.get("HF_TOKEN_PATH", hub / "token")), "HF_TOKEN"
    yield Path(environment.get("RAY_AUTH_TOKEN_PATH", home / ".ray/auth_token")), "RAY_AUTH_TOKEN"
    yield home / ".netrc", ".netrc"


def forms_of(secrets: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield every form in which a text may have a secret, the longest secret first."""
    for secret, name in sorted(secrets.items(), key=lambda item: -len(item[0])):
        raw = secret.encode(errors="surrogateescape")
        forms = (
            secret,
            json.dumps(secret)[1:-1],
            repr(secret)[1:-1],
            repr(raw)[2:-1],
            quote(raw, safe=""),
            quote(raw),
            quote_plus(raw),
            *_base64(raw),
            *(line for line in secret.splitlines() if len(line) >= SHORTEST_LINE),
        )
        yield from ((form, name) for form in dict.fromkeys(forms))


def _base64(raw: bytes) -> Iterator[str]:
    """Yield what base64 makes of bytes wherever they begin in a text, as in "user:password"."""
    for before, begin in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(bytes(before) + raw).decode()
        yield encoded[begin : (before + len(raw)) * 8 // 6]
