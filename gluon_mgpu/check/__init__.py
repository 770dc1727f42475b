"""Compares a step on several devices with the same step on one: `gluon-mgpu check`."""
