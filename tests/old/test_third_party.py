"""`gluon-mgpu run` restores names of pandas, Pillow, SciPy and other packages."""

from types import SimpleNamespace

import numpy as np
import pytest

from gluon_mgpu.old import third_party

pytest.importorskip("pandas", reason="needs pandas")
pytest.importorskip("yaml", reason="needs PyYAML")

# Claim: (program, what it prints)
PROGRAMS = {
    "Matplotlib, Pillow and PyYAML have their former names": (
        """
        import yaml
        from matplotlib import cm, pyplot
        from PIL import Image, ImageDraw, ImageFont
        pyplot.style.use(["seaborn-whitegrid", "seaborn"])
        assert cm.get_cmap("jet", 2).N == 2
        assert (Image.ANTIALIAS, Image.CUBIC) == (Image.LANCZOS, Image.BICUBIC)
        draw, font = ImageDraw.Draw(Image.new("L", (80, 40))), ImageFont.load_default()
        width, height = font.getsize("ab")
        assert draw.textsize("ab") == draw.textsize("ab", font=font) == (width, height) and width > 0 < height
        print(yaml.load("a: [1]"), yaml.load("b: 2", Loader=yaml.SafeLoader), yaml.load("c", yaml.SafeLoader))
        """,
        "{'a': [1]} {'b': 2} c\n",
    ),
    "pandas treats texts and frames as pandas 1 did": (
        """
        import numpy as np, pandas as pd
        frame = pd.DataFrame({"kind": ["a", "b", None, "a"], "size": [1, 2, 3.5, 4]})
        numeric = frame.dtypes[frame.dtypes != "object"].index
        assert list(numeric) == ["size"] and frame.mean().to_dict() == {"size": 2.625}
        assert frame.std().tolist() == [frame["size"].std()] and frame.assign(n=1).groupby("n").mean().size == 1
        assert pd.get_dummies(frame, dummy_na=True).values.dtype == float
        first, second = np.split(frame, 2)
        assert second["size"].tolist() == [3.5, 4] and frame.swapaxes(0, 1).shape == (2, 4)
        hours = pd.Series([1, 3], pd.date_range("2020-01-01", periods=2, freq="H"))
        assert hours.resample("2H").sum().tolist() == [4] and hours.index[1].hour == 1
        try:
            frame.mean(unknown=1)
        except TypeError:
            print("ran")
        """,
        "ran\n",
    ),
    "chained assignment works or is an error": (
        """
        import warnings, pandas as pd
        warnings.filterwarnings("ignore")
        frame = pd.DataFrame({"a": [1, 2]})
        frame.loc[1, "a"] = 4
        frame["a"] = frame["a"] + 1
        print(frame["a"].tolist())
        try:
            frame["a"][0] = 3
            print(frame["a"][0] == 3)
        except RuntimeError as error:
            print("'pandas<3'" in str(error))
        """,
        "[2, 5]\nTrue\n",
    ),
}


@pytest.mark.parametrize("claim", PROGRAMS)
def test_third_party(claim, printed):
    assert printed[claim] == PROGRAMS[claim][1]


def test_scipys_functions_read_resize_and_save_images(tmp_path):
    misc, path = SimpleNamespace(), tmp_path / "image.png"
    third_party.RESTORE["scipy.misc"](misc)
    misc.imsave(path, np.arange(12).reshape(3, 4))  # stretched from 0 to 255
    image = misc.imread(path)
    assert (image.dtype, image.min(), image.max(), image.shape) == (np.uint8, 0, 255, (3, 4))
    assert misc.imread(path, mode="RGB").shape == (3, 4, 3)
    assert misc.imresize(image, (6, 2)).shape == (6, 2) and misc.imresize(image, 50).shape == (1, 2)
    assert misc.imresize(np.stack([image] * 3, 2), 2.0, "nearest")[4, 6].tolist() == [image[2, 3]] * 3


def test_pandas_appends_converts_and_fills():
    pd = pytest.importorskip("pandas")
    third_party.RESTORE["pandas"](pd)
    frame = pd.DataFrame({"a": [1], "b": ["x"]})
    assert frame.append({"a": 2, "b": "y"}, ignore_index=True).values.tolist() == [[1, "x"], [2, "y"]]
    assert frame.append(frame).shape == (2, 2) and frame.a.append(frame.a).tolist() == [1, 1]
    assert frame.as_matrix(["a"]).tolist() == [[1]] and [name for name, _ in frame.iteritems()] == ["a", "b"]
    gap = pd.Series([1, None, 3])
    assert gap.fillna(method="ffill").tolist() == [1, 1, 3] and gap.fillna(method="bfill").tolist() == [1, 3, 3]
    assert gap.fillna(0).tolist() == [1, 0, 3]
    gap.fillna(method="pad", inplace=True)
    assert gap.tolist() == [1, 1, 3]


@pytest.mark.parametrize("name, letter", [("h", "H"), ("ME", "M"), ("QE-DEC", "Q"), ("W-SUN", "W"), ("min", "T")])
def test_gluonts_gets_the_former_letters_of_frequencies(name, letter):
    module = SimpleNamespace(  # as modules of gluonts
        norm_freq_str=lambda name: name.split("-")[0],
        to_offset=lambda freq: SimpleNamespace(name=freq.lstrip("2"), n=2),
    )
    third_party.RESTORE["gluonts.time_feature._base"](module)
    third_party.RESTORE["gluonts.mx.model.deepvar._estimator"](module)
    assert module.norm_freq_str(name) == letter
    offset = module.to_offset(f"2{name}")
    assert (offset.n, module.norm_freq_str(offset.name)) == (2, letter)
