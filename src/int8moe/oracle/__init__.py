"""Choosing: `base` is the general oracle, `int8` the one for INT8 experts."""
