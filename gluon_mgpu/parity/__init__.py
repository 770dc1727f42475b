"""Does the port do what the notebooks did? Their printed accuracies, values and claims, each held against ours.

`run` asks all of it: `examples` the values, `drift` the step beside the notebook's own code, `bands` the accuracies,
`claims` the lecture; `page` shows it. docs/parity.md has the rules and what they catch.
"""
