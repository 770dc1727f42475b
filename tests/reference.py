"""The reference for numerical tests, in float64 NumPy: LeNet and softmax regression, forward, backward and a step.

Networks are told apart by their parameters: LeNet has eight arrays, softmax regression two. Written without MXNet.
"""

import numpy as np

EPSILON = float(np.finfo(np.float32).eps)
SHAPES = [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]  # of LeNet's weights


def additions(examples):
    """The length of the longest sum in a step: the gradient of the first convolution, or the first dense layer."""
    return max(examples * 26 * 26, 800)


def assert_close(found, expected, additions):
    """Fail if found differs from expected by more than float32 rounding in this many additions can explain."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= additions * EPSILON * np.abs(expected).max()


def initial(scale=0.1, seed=1, biases=0.0):
    """Parameters of LeNet in float32: weights from normal(0, scale), biases from normal(0, biases)."""
    rng, params = np.random.default_rng(seed), []
    for shape in SHAPES:
        params += [rng.normal(0, scale, shape).astype(np.float32)]
        params += [(rng.normal(0, biases, shape[0]) if biases else np.zeros(shape[0])).astype(np.float32)]
    return params


def scores(params, X):
    """Scores (n, classes) of images X (n, ...)."""
    return _forward(params, X)[-1] if len(params) == 8 else X.reshape(len(X), -1) @ params[0].T + params[1]


def losses_and_gradients(params, X, y):
    """Losses (n,) of images X (n, ...) with labels y (n,), and the gradients of their sum by the parameters."""
    outputs = scores(params, X)
    shifted = outputs - outputs.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    examples = np.arange(len(X))
    d = np.exp(log_p)
    d[examples, y] -= 1  # the gradient of the scores
    return -log_p[examples, y], (_lenet_gradients if len(params) == 8 else _dense_gradients)(params, X, d)


def steps(params, batches, lr):
    """Yields the losses, the gradients and the new parameters of each step of SGD. batches: [(X, y)] of arrays."""
    params = [p.astype(np.float64) for p in params]
    for X, y in batches:
        losses, gradients = losses_and_gradients(params, X.astype(np.float64), y.astype(int))
        params = [p - lr / len(X) * g for p, g in zip(params, gradients)]
        yield losses, gradients, params


def _dense_gradients(params, X, d):
    return [d.T @ X.reshape(len(X), -1), d.sum(0)]


def _lenet_gradients(params, X, d4):
    _, _, W2, _, W3, _, W4, _ = params
    a1, h1, a2, h2, a3, h3, _ = _forward(params, X)
    d3 = (d4 @ W4) * (a3 > 0)
    d2 = _unpool((d3 @ W3).reshape(len(X), 50, 4, 4), a2.shape) * (a2 > 0)
    d1 = _unpool(_convolve_back(d2, W2), a1.shape) * (a1 > 0)
    gradients = [_kernel_gradient(X, d1), d1.sum((0, 2, 3)), _kernel_gradient(h1, d2), d2.sum((0, 2, 3))]
    return gradients + [d3.T @ h2, d3.sum(0), d4.T @ h3, d4.sum(0)]


def _forward(params, X):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    a1 = _convolve(X, W1) + b1[:, None, None]
    h1 = _pool(np.maximum(a1, 0))
    a2 = _convolve(h1, W2) + b2[:, None, None]
    h2 = _pool(np.maximum(a2, 0)).reshape(len(X), -1)
    a3 = h2 @ W3.T + b3
    h3 = np.maximum(a3, 0)
    return a1, h1, a2, h2, a3, h3, h3 @ W4.T + b4


def _windows(X, height, width):
    return np.lib.stride_tricks.sliding_window_view(X, (height, width), (2, 3))  # (n, c, h, w, height, width)


def _convolve(X, W):
    return np.einsum("nihwyx,oiyx->nohw", _windows(X, *W.shape[2:]), W, optimize=True)


def _kernel_gradient(X, d):
    kernel = X.shape[2] - d.shape[2] + 1
    return np.einsum("nihwyx,nohw->oiyx", _windows(X, kernel, kernel), d, optimize=True)


def _convolve_back(d, W):
    margin = W.shape[2] - 1
    padded = np.pad(d, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
    return np.einsum("nohwyx,oiyx->nihw", _windows(padded, *W.shape[2:]), W[:, :, ::-1, ::-1], optimize=True)


def _pool(X):
    n, c, h, w = X.shape
    return X[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, c, h // 2, 2, w // 2, 2).mean((3, 5))


def _unpool(d, shape):
    X = np.zeros(shape)
    X[:, :, : 2 * d.shape[2], : 2 * d.shape[3]] = d.repeat(2, 2).repeat(2, 3) / 4
    return X
