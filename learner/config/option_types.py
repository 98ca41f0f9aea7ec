"""Types of the options of advantages, losses and corrections, by which they are checked."""

from typing import Annotated

from pydantic import Field

Positive = Annotated[float, Field(gt=0)]
"""Infinity is one of them."""
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
