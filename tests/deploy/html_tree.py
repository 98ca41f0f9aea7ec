"""Pages as trees, to look at their structure."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input"}


@dataclass
class Element:
    tag: str
    attributes: dict = field(default_factory=dict)
    inside: list = field(default_factory=list)

    @property
    def text(self):
        return "".join(x if isinstance(x, str) else x.text for x in self.inside)

    @property
    def children(self):
        return [x for x in self.inside if not isinstance(x, str)]

    def all(self, tag=None, kind=None, **attributes):
        """Return the elements inside with a tag, a class and attributes, in their order."""
        found = []
        for child in self.children:
            classes = (child.attributes.get("class") or "").split()
            fits = tag in (None, child.tag) and (kind is None or kind in classes)
            if fits and attributes.items() <= child.attributes.items():
                found.append(child)
            found += child.all(tag, kind, **attributes)
        return found

    def rows(self):
        """Return the texts of the cells of each row of a table."""
        return [[cell.text for cell in row.children] for row in self.all("tr")]


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = [Element("page")]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs))
        self.open[-1].inside.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].inside.append(data)


def read_page(text):
    """Return a page as a tree; every element that is opened must be closed in its place."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    [page] = reader.open
    return page
