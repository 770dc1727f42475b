"""Checks that this project reproduces the accuracies, values and claims in the notebooks and the lecture.

`run` calls all checks: `examples` (printed values), `drift` (training steps), `bands` (accuracies) and `claims` (the
lecture). `report` formats the result. docs/parity.md explains the criteria and which errors they detect.
"""
