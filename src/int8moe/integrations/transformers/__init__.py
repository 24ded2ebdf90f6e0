"""Transformers models with INT8 experts. Public names: `int8moe.transformers`."""
