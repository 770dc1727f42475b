"""`build` creates the model of a lesson, and checks that settings, devices, network and data fit together."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import mxnet as mx
from mxnet import Context, nd

from gluon_mgpu.compat import startup
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.support.errors import UsageError, reason
from gluon_mgpu.training import lessons
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.model import Model
from gluon_mgpu.training.models import ArrayModel, GluonModel, ShardedModel, unfit
from gluon_mgpu.training.tuning import TunedModel

MODELS: dict[str, type[Model]] = {"scratch": ArrayModel, "highlevel": GluonModel, "sharded": ShardedModel}


def build(
    impl: str | ModuleType,
    ctx: list[Context],
    config: Config | None = None,
    image_shape: Sequence[int] = IMAGE_SHAPE,
    classes: int = 10,
    exactly: bool = False,
) -> Model:
    """Create the model of a lesson on the devices in ctx, with new parameters.

    impl: a lesson, or its name or path, as in `lessons.load`. config: default: plain SGD, as in the notebooks.
    image_shape: (channels, height, width). classes: number of classes. exactly: whether more scores are an error.
    Raises UsageError if the settings, the devices, the network and the data do not fit together.
    """
    startup.check_contexts(ctx)
    lesson = impl if isinstance(impl, ModuleType) else lessons.load(impl)
    config = config or Config(impl=lessons.name_of(lesson))
    lessons.check_settings(config, lesson)
    if config.shares and len(config.shares) != len(ctx):
        raise UsageError("shares", config.shares, f"{len(config.shares)} shares for {len(ctx)} devices")
    model_class = TunedModel if config.tune else MODELS[lessons.original(lesson)]
    model = model_class(lesson, ctx, config, image_shape)
    try:
        scores = model.predict(nd.zeros((1, *model.image_shape), ctx=ctx[0])).shape
    except (mx.MXNetError, ValueError, AssertionError) as error:
        raise unfit(config, f"does not accept images of shape {model.image_shape} ({reason(error)})") from None
    if scores[:1] != (1,) or len(scores) != 2 or scores[1] < classes or (exactly and scores[1] > classes):
        raise unfit(config, f"returns scores of shape {scores} for one image, but needs (1, {classes})")
    return model
