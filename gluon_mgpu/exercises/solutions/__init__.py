"""Our solutions. Each module is an example of a learner's file: the task, and one function that solves it."""
