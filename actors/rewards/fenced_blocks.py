"""Reads the fenced blocks of completions, by CommonMark and a little more."""

import re

from markdown_it import MarkdownIt

GLUED_OPENING = re.compile(
    r"(?m)^(?![ \t>]*+(?:(?:[-*+]|\d+[.)])[ \t]*+)?`)([^`\n]*[^`\s])[ \t]*(?=`{3,}[\w+#.-]*[ \t]*$)"
)
"""Text before a fence on its line, as in "Answer: ```json", other than the mark of a list."""
GLUED_CLOSING = re.compile(r"(?m)^( {0,3}(?:`{3,}|~{3,}))[ \t]*(?=</)")
"""A fence before a tag, as in "```</answer>"."""
PAGES = ("markdown", "md")
"""Languages of blocks whose own blocks are read too."""
MARKDOWN = MarkdownIt("zero").enable(["code", "fence", "list", "blockquote"])
MARKDOWN.core.ruler.enableOnly(["normalize", "block"])


def read_block(completion: str, *languages: str) -> str:
    """Return the content of the block that counts: the last one in one of `languages`.

    Without any, it is the last block that names no language, or else the whole completion. Case,
    versions ("Python3.11") and attributes ("{.python}", "json title=x") do not matter. A block that
    is not closed reaches to the end.
    """
    text = GLUED_CLOSING.sub(r"\1\n", GLUED_OPENING.sub(r"\1\n", completion.replace("\r\n", "\n")))
    blocks = _blocks(text)
    blocks += [inner for language, page in blocks if language in PAGES for inner in _blocks(page)]
    for wanted in (languages, ("",)):
        contents = [content for language, content in blocks if language in wanted]
        if contents:
            return contents[-1]
    return completion


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return the languages and contents of the fenced blocks."""
    tokens = MARKDOWN.parse(text)
    return [(_language(token.info), token.content) for token in tokens if token.type == "fence"]


def _language(info: str) -> str:
    """Return the language of an info string without its version; "" if it names none."""
    name = re.match(r"[{.\s]*(?:#[\w-]+[.\s]+)?([\w+#.-]*)", info)
    return name[1].lower().rstrip("0123456789.-") if name else ""
