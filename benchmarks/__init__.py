"""Measurements of Headway; `headway bench` starts them."""
