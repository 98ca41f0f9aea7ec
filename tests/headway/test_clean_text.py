"""Secrets that are hidden, and characters that are escaped."""

import base64
import json
import re
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.clean_text import (
    forget,
    forms_of,
    is_secret,
    printable,
    register,
    without_known_secrets,
    without_secrets,
    without_secrets_in,
)

SECRET = "a\"b'c\\d/e+f é"


@pytest.fixture
def held(monkeypatch):
    """Set a variable of the environment, of which the process has just learnt."""

    def hold(name, value):
        monkeypatch.setenv(name, value)
        register([])

    forget()
    yield hold
    forget()


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True), ("OPENAI_API_KEY", True), ("WANDB_API_KEY", True), ("apiKey", True),
        ("PGPASSWORD", True), ("MYSQL_PWD", True), ("AWS_SECRET_ACCESS_KEY", True),
        ("AWS_ACCESS_KEY_ID", True), ("HEADWAY_METRICS_TOKEN", True), ("SENTRY_DSN", True),
        ("GITHUB_PAT", True), ("SSH_AUTH_SOCK", False), ("RAY_AUTH_MODE", False), ("PATH", False),
        ("PWD", False), ("OLDPWD", False), ("HOME", False), ("", False), ("PATHS", False),
        ("RAY_AUTH_TOKEN_PATH", False), ("TOKENIZERS_PARALLELISM", False), ("MAX_TOKENS", False),
    ],
)  # fmt: skip
def test_a_variable_is_a_secret_by_its_name(name, secret):
    assert is_secret(name) == secret


@pytest.mark.parametrize(
    "written",
    [
        SECRET, json.dumps(SECRET), repr(SECRET), quote(SECRET, safe=""),
        base64.b64encode(SECRET.encode()).decode(), f"x{SECRET}y {SECRET}",
        repr(SECRET.encode()), quote(SECRET), quote_plus(SECRET),
        *(base64.b64encode(f"{user}:{SECRET}@".encode()).decode() for user in ("me", "you", "id")),
    ],
)  # fmt: skip
def test_a_secret_is_hidden_in_every_form(held, written):
    held("MY_KEY", f" {SECRET}\n")
    text = without_secrets(f"before {written} after")
    assert re.fullmatch("before .*\\[MY_KEY\\].* after", text)
    assert "d/e+f" not in text


def test_every_line_of_a_secret_is_hidden_by_itself_as_logs_are_searched_by_lines(held):
    lines = ["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0", "c2hvcnQ="]
    held("SIGNING_KEY", "\n".join(lines))
    assert [without_secrets(f"x {line}") for line in lines[:2]] == ["x [SIGNING_KEY]"] * 2
    assert without_secrets("\n".join(lines)) == "[SIGNING_KEY]"


def test_a_variable_that_a_recipe_names_and_one_that_is_gone_are_secrets(held, monkeypatch):
    held("LOGIN", "me-and-more")
    assert without_secrets("me-and-more") == "me-and-more"
    register(["LOGIN"])
    assert without_secrets("me-and-more") == "[LOGIN]"
    monkeypatch.delenv("LOGIN")
    register([])
    assert without_secrets("me-and-more") == "[LOGIN]"


def test_tokens_in_files_are_secrets(held, tmp_path):
    held("HOME", str(tmp_path))
    for path, text in (
        (".cache/huggingface/token", "hub-token-7\n"),
        (".ray/auth_token", "ray-token-7"),
        (".netrc", "machine api.wandb.ai\n login user\n password netrc-pass-7\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    register([])
    shown = without_secrets("hub-token-7 ray-token-7 netrc-pass-7 user")
    assert shown == "[HF_TOKEN] [RAY_AUTH_TOKEN] [.netrc] user"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host/v1", "https://[hidden]@host/v1"),
        ("https://token@host", "https://[hidden]@host"),
        ("/x?api_key=abc&n=1", "/x?api_key=[hidden]&n=1"),
        ("?X-Amz-Signature=abc", "?X-Amz-Signature=[hidden]"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: [hidden]"),
        ("{'authorization': 'Bearer abc.def'}", "{'authorization': '[hidden]'}"),
        ("(b'Authorization', b'Bearer abc')", "(b'Authorization', b'[hidden]')"),
        ("sent Bearer abcdefghijkl", "sent Bearer [hidden]"),
        (f"hf_{'a' * 34}", "[hidden]"),
        ("git@github.com:a/b", "git@github.com:a/b"),
        ("bearer of news, basic sums, key=3", "bearer of news, basic sums, key=3"),
        ("https://h/a@2x.png", "https://h/a@2x.png"),
    ],
)
def test_what_has_the_form_of_a_secret_is_hidden(held, text, shown):
    assert without_secrets(text) == shown
    assert without_known_secrets(text) == text


@pytest.mark.parametrize(
    ("name", "value", "text", "shown"),
    [
        ("A_KEY", "abc", "abc", "abc"),
        ("DATABASE_URL", "postgres://me:hunter22@db", "me, hunter22", "me, [DATABASE_URL]"),
    ],
)
def test_a_short_value_is_no_secret_and_the_password_of_an_address_is(
    held, name, value, text, shown
):
    held(name, value)
    assert without_secrets(text) == shown


def test_texts_in_records_are_cleaned_and_the_rest_stays(held):
    held("MY_KEY", "123456")
    record = {"n": 123456, "x": ["a 123456", None, 1.5, True], "123456": {}}
    cleaned = {"n": 123456, "x": ["a [MY_KEY]", None, 1.5, True], "[MY_KEY]": {}}
    assert without_secrets_in(record) == cleaned


@given(st.text())
@example("\x1b[2J\x00\u202e\ud800\r")
@example("a\nb\u2028é")
def test_text_is_printable_and_says_what_it_was(text):
    shown = printable(text)
    assert all(c.isprintable() or c == "\n" for c in shown)
    shown.encode()
    if text.isprintable():
        assert shown == text


@given(st.text(st.characters(codec="utf-8"), min_size=6))
def test_no_text_with_a_secret_still_has_it(secret):
    forms = dict(forms_of({secret: "NAME"}))
    assert set(forms.values()) == {"NAME"}
    assert {secret, quote(secret, safe="")} <= forms.keys()
