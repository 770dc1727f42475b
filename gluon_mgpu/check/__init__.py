"""Compares a training step on several devices with the same step on one: the parts that every framework shares."""
