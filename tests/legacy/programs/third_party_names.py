# pip install pandas scipy python-dateutil six pytz tzdata
import tempfile

import numpy as np
import pandas as pd
from PIL import Image
from scipy import misc

frame = pd.DataFrame({"a": [1], "b": ["x"]})
assert frame.append({"a": 2, "b": "y"}, ignore_index=True).values.tolist() == [[1, "x"], [2, "y"]]
assert frame.append(frame).shape == (2, 2) and frame.a.append(frame.a).tolist() == [1, 1]
assert frame.as_matrix(["a"]).tolist() == [[1]] and [name for name, _ in frame.iteritems()] == ["a", "b"]
gap = pd.Series([1, None, 3])
assert gap.fillna(method="ffill").tolist() == [1, 1, 3] and gap.fillna(method="bfill").tolist() == [1, 3, 3]
assert gap.fillna(0).tolist() == [1, 0, 3]
gap.fillna(method="pad", inplace=True)
assert gap.tolist() == [1, 1, 3]

assert (Image.ANTIALIAS, Image.CUBIC) == (Image.LANCZOS, Image.BICUBIC)
with tempfile.NamedTemporaryFile(suffix=".png") as file:
    misc.imsave(file.name, np.arange(12).reshape(3, 4))  # stretched from 0 to 255
    image = misc.imread(file.name)
assert (image.dtype, image.min(), image.max(), image.shape) == (np.uint8, 0, 255, (3, 4))
assert misc.imresize(image, (6, 2)).shape == (6, 2) and misc.imresize(image, 50).shape == (1, 2)
assert misc.imresize(np.stack([image] * 3, 2), 2.0, "nearest")[4, 6].tolist() == [image[2, 3]] * 3
