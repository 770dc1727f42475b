"""The hidden cases: one module per lesson page, with one function per exercise, named like it."""
