"""Our solutions. Each module looks like a learner's file: the task, and a function that solves it."""
