"""Our solutions. Each module is what a learner's file may look like: the task, and one function that solves it."""
