"""How a lesson is trained: configuration, run folder, models, step, loop and workers."""
