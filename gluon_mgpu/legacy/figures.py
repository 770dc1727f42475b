"""Timers, sums and plots for the book's programs. A notebook shows the plots; a program can save them with plt."""
# mypy: allow-untyped-defs

import itertools
import sys
import time
from functools import partial

import numpy
from matplotlib import pyplot as plt

IN_NOTEBOOK = "ipykernel" in sys.modules
STYLES = ("-", "m--", "g-.", "r:")
LABELS = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def to_numpy(array):
    """Convert an MXNet array to NumPy; return any other value unchanged."""
    return array.asnumpy() if hasattr(array, "asnumpy") else array


class Timer:
    """A timer that starts immediately. times: the seconds from each start to the next stop."""

    def __init__(self):
        self.times = []
        self.start()

    def start(self):
        self.tik = time.time()

    def stop(self):
        self.times.append(time.time() - self.tik)
        return self.times[-1]

    def avg(self):
        return self.sum() / len(self.times)

    def sum(self):
        return sum(self.times)

    def cumsum(self):
        return list(itertools.accumulate(self.times))


class Accumulator:
    """Keeps n running sums."""

    def __init__(self, n):
        self.data = [0.0] * n

    def add(self, *args):
        self.data = [total + float(value) for total, value in zip(self.data, args)]

    def reset(self):
        self.data = [0.0] * len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def use_svg_display():
    if IN_NOTEBOOK:
        from matplotlib_inline import backend_inline

        backend_inline.set_matplotlib_formats("svg")


def set_figsize(figsize=(3.5, 2.5)):
    use_svg_display()
    plt.rcParams["figure.figsize"] = figsize


def set_axes(axes, xlabel, ylabel, xlim, ylim, xscale, yscale, legend):
    axes.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale, xlim=xlim, ylim=ylim)
    if legend:
        axes.legend(legend)
    axes.grid()


def plot(
    X, Y=None, xlabel=None, ylabel=None, legend=None, xlim=None, ylim=None, xscale="linear", yscale="linear",
    fmts=STYLES, figsize=(3.5, 2.5), axes=None
):  # fmt: skip
    """Plot one or more curves. X, Y: the coordinates of one curve, or a list with the coordinates of each curve.

    Without Y, X contains the y values, and the x values are 0, 1, 2, ...
    """
    set_figsize(figsize)
    axes = axes or plt.gca()
    axes.cla()
    coordinates = [_curves(X)] if Y is None else [itertools.cycle(_curves(X)), _curves(Y)]
    for *curve, style in zip(*coordinates, itertools.cycle(fmts)):
        axes.plot(*curve, style)
    set_axes(axes, xlabel, ylabel, xlim, ylim, xscale, yscale, legend)


def _curves(data):
    data = to_numpy(data)
    return [data] if numpy.ndim(data[0]) == 0 else [to_numpy(curve) for curve in data]


def semilogy(x_vals, y_vals, x_label, y_label, x2_vals=None, y2_vals=None, legend=None, figsize=(3.5, 2.5)):
    X, Y = ([x_vals], [y_vals]) if x2_vals is None else ([x_vals, x2_vals], [y_vals, y2_vals])
    plot(X, Y, x_label, y_label, legend, yscale="log", fmts=("-", ":"), figsize=figsize)


class Animator:
    """A plot that grows point by point; a notebook redraws it after each call to add."""

    def __init__(
        self, xlabel=None, ylabel=None, legend=None, xlim=None, ylim=None, xscale="linear", yscale="linear",
        fmts=STYLES, nrows=1, ncols=1, figsize=(3.5, 2.5)
    ):  # fmt: skip
        use_svg_display()
        self.fig, axes = plt.subplots(nrows, ncols, figsize=figsize, squeeze=False)
        self.axes = axes.flatten()
        self.config_axes = partial(set_axes, self.axes[0], xlabel, ylabel, xlim, ylim, xscale, yscale, legend)
        self.X, self.Y, self.fmts = [], [], fmts

    def add(self, x, y):
        """Add a point to each curve, and redraw the plot.

        x, y: a single value, or a list with one value per curve (None: no new point).
        """
        ys = y if isinstance(y, (list, tuple)) else [y]
        xs = x if isinstance(x, (list, tuple)) else [x] * len(ys)
        if not self.X:
            self.X, self.Y = [[] for _ in ys], [[] for _ in ys]
        for X, Y, a, b in zip(self.X, self.Y, xs, ys):
            if a is not None and b is not None:
                X.append(to_numpy(a))
                Y.append(to_numpy(b))
        self.axes[0].cla()
        for X, Y, style in zip(self.X, self.Y, itertools.cycle(self.fmts)):
            self.axes[0].plot(X, Y, style)
        self.config_axes()
        if IN_NOTEBOOK:
            from IPython import display

            display.display(self.fig)
            display.clear_output(wait=True)


def show_images(imgs, num_rows, num_cols, titles=None, scale=1.5):
    """Show images in a grid. Returns the axes. In d2lzh, the fourth argument is scale instead of titles."""
    if isinstance(titles, (int, float)):
        titles, scale = None, titles
    size = (num_cols * scale, num_rows * scale)
    _, axes = plt.subplots(num_rows, num_cols, figsize=size, squeeze=False, layout="constrained")  # room for titles
    for axis, image, title in zip(axes.flat, imgs, titles or itertools.repeat(None)):
        axis.imshow(to_numpy(image))
        axis.set_axis_off()
        axis.set_title(title)
    return axes.flatten()


def get_fashion_mnist_labels(labels):
    return [LABELS[int(label)] for label in to_numpy(labels)]


def show_fashion_mnist(images, labels):
    use_svg_display()
    show_images([image.reshape((28, 28)) for image in images], 1, len(images), labels)


def predict_ch3(net, test_iter, n=6):
    """Show n images with their true and predicted labels."""
    X, y = next(iter(test_iter))
    pairs = zip(get_fashion_mnist_labels(y[:n]), get_fashion_mnist_labels(net(X).argmax(axis=1)))
    show_fashion_mnist(X[:n], [f"{true}\n{predicted}" for true, predicted in pairs])
