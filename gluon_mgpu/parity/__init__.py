"""Does this project do what the notebooks did? Their printed accuracies, values and claims, compared with ours.

`run` does everything: `examples` checks the printed values, `drift` the training step, `bands` the accuracies, `claims`
the lecture. `report` shows the result. docs/parity.md has the rules and what they catch.
"""
