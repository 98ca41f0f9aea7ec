"""Types of keys and options, by which they are checked."""

from os.path import expanduser
from typing import Annotated

from pydantic import AfterValidator, Field

Positive = Annotated[float, Field(gt=0)]
"""Infinity is one of them."""
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
ModelName = Annotated[str, AfterValidator(expanduser)]
"""A model folder, where `~` is the home folder, or a hub name."""
