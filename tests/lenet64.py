from reference import EPSILON, additions, assert_close, losses_and_gradients, scores  # noqa: F401
