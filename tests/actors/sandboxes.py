"""Mark of tests that need the sandbox of programs, which not every machine has."""

import pytest

from actors.sandbox.sandbox import check_sandbox
from headway.errors import HeadwayError

try:
    check_sandbox()
    MISSING = ""
except HeadwayError as error:
    MISSING = str(error)
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=MISSING)
