# pip install gluonts==0.13.7 pandas<3 pytz tzdata pydantic<2 toolz
import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.mx import SimpleFeedForwardEstimator, Trainer

series = [{"start": "2020-01-01", "target": np.sin(np.arange(200) / 5 + i)} for i in range(4)]
data = ListDataset(series, freq="D")
trainer = Trainer(ctx="cpu", epochs=2, num_batches_per_epoch=5)
estimator = SimpleFeedForwardEstimator(prediction_length=5, context_length=10, trainer=trainer)
print(next(iter(estimator.train(data).predict(data))).mean)
