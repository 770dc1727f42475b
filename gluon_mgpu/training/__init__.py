"""How a lesson is trained: configuration, run folder, models, step, loop, workers, and the check against one device."""
