"""mxnet-cu112 and NVIDIA's wheels, with stand-ins for both in a folder of their own, each in a process of its own."""

import configparser
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gluon_mgpu.runtime import cuda

LIBM = next(line.split()[-1] for line in open("/proc/self/maps") if re.search(r"/libm[.-][^/]*so", line))
ALL = [library for _, *libraries in cuda.LIBRARIES for library in libraries]


@pytest.fixture
def site(tmp_path):
    """A site-packages folder: install(wheel, *files) leaves the files, which the loader can open, and the metadata."""

    class Site:
        folder = tmp_path / "site packages"

        def install(self, wheel, *files):
            info = self.folder / f"{wheel.replace('-', '_')}-1.9.1.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 1.9.1\n")
            (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
            for file in files:
                path = self.folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".py":
                    path.write_text("")
                else:
                    path.symlink_to(LIBM)

        def install_mxnet(self, wheel="mxnet-cu112"):
            self.install(wheel, "mxnet/__init__.py")

        def install_nvidia(self, without=()):
            for wheel, *libraries in cuda.LIBRARIES:
                name = wheel.partition("<")[0]
                if name not in without:
                    self.install(name, *(f"nvidia/{name.split('-')[1]}/lib/{library}" for library in libraries))

        def python(self, code, driver="libm.so.6"):
            code = f"from gluon_mgpu import cuda; cuda.DRIVER = {driver!r}\n" + textwrap.dedent(code)
            return subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": str(self.folder)},
                capture_output=True,
                text=True,
                timeout=60,
            )

        def train(self, **driver):
            return self.python("from gluon_mgpu.commands.train import train; train(['--gpus', '2'])", **driver)

        def opened(self):
            """What was opened, in order."""
            done = self.python("""
                opened, really = [], cuda._open
                cuda._open = lambda library: (really(library), opened.append(library))
                cuda.prepare()
                print(*opened, sep="\\n", end="\\n" * bool(opened))
            """)
            assert done.returncode == 0, done.stderr
            return done.stdout.splitlines()

        def missing(self):
            return self.python("print('\\n'.join(cuda.missing()))").stdout.splitlines()

    return Site()


def test_every_library_is_opened_from_its_wheel_after_the_libraries_that_it_needs(site):
    site.install_mxnet()
    site.install_nvidia()
    driver, *paths = site.opened()
    assert driver == "libm.so.6"  # which stands in for libcuda.so.1
    assert all(path.startswith(f"{site.folder}/nvidia/") for path in paths)
    at = {Path(path).name: i for i, path in enumerate(paths)}
    assert set(at) == set(ALL)
    # As `readelf -d` and `strings` show it of the libraries in the wheels.
    for library, *needs in (
        ("libcublas.so.11", "libcublasLt.so.11"),
        ("libcusolver.so.11", "libcublas.so.11", "libcublasLt.so.11"),
        ("libcudnn_ops_infer.so.8", "libcublas.so.11", "libcublasLt.so.11", "libnvrtc.so.11.2"),
        ("libcudnn_ops_train.so.8", "libcudnn_ops_infer.so.8"),
        ("libcudnn_cnn_infer.so.8", "libcudnn_ops_infer.so.8"),
        ("libcudnn_cnn_train.so.8", "libcudnn_ops_train.so.8", "libcudnn_cnn_infer.so.8"),
        ("libcudnn_adv_infer.so.8", "libcudnn_ops_infer.so.8"),
        ("libcudnn_adv_train.so.8", "libcudnn_ops_train.so.8", "libcudnn_adv_infer.so.8"),
    ):
        assert max(at[need] for need in needs) < at[library], library


@pytest.mark.parametrize("wheel", ["mxnet", "mxnet-cu102"])
def test_nothing_is_opened_for_another_mxnet_than_mxnet_cu112(site, wheel):
    site.install_mxnet(wheel)
    site.install_nvidia()
    assert site.opened() == []


def test_without_a_driver_training_ends_in_one_line_that_says_what_to_do(site):
    site.install_mxnet()
    site.install_nvidia()
    done = site.train(driver="libcuda-not-there.so.1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: libcuda-not-there.so.1 is not there: mxnet-cu112 needs NVIDIA's driver, on CPU contexts too. Install "
        "the driver, or the CPU wheel: `pip uninstall -y mxnet-cu112 && pip install --no-deps mxnet==1.9.1`\n"
    )


def test_missing_libraries_are_one_line_that_names_them_and_their_wheels(site):
    site.install_mxnet()
    site.install_nvidia(without=["nvidia-cudnn-cu11", "nvidia-nccl-cu11"])
    site.install("nvidia-cudnn-cu11", "nvidia/cudnn/lib/libcudnn.so.9")  # what pip installs unless told otherwise
    done = site.train()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    named = re.findall(r"lib\w+\.so[.\d]*", done.stderr)
    assert named == [library for library in ALL if "cudnn" in library or "nccl" in library]
    assert done.stderr.endswith(
        "run `pip install --force-reinstall --no-deps 'nvidia-cudnn-cu11<9' nvidia-nccl-cu11`\n"
    )


def test_a_library_that_no_wheel_brings_is_taken_from_the_system(site):
    site.install_mxnet()
    site.install_nvidia(without=["nvidia-nccl-cu11"])
    assert len(site.missing()) == 1
    (site.folder / "libnccl.so.2").symlink_to(LIBM)
    done = subprocess.run(
        [sys.executable, "-c", "from gluon_mgpu import cuda; cuda.DRIVER = 'libm.so.6'; print(cuda.missing())"],
        env={**os.environ, "PYTHONPATH": str(site.folder), "LD_LIBRARY_PATH": str(site.folder)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_library_that_was_cut_off_or_removed_is_one_line_with_how_to_have_it_again(site):
    site.install_mxnet()
    site.install_nvidia()
    cut, gone = (next(site.folder.glob(f"nvidia/*/lib/{name}")) for name in ("libcufft.so.10", "libcurand.so.10"))
    for path in (cut, gone):
        path.unlink()
    cut.write_bytes(b"\x7fELF")
    for line, path, wheel in zip(site.missing(), (cut, gone), ("nvidia-cufft-cu11", "nvidia-curand-cu11")):
        assert path.name in line
        assert re.search(f"run `pip install --force-reinstall --no-deps '?{wheel}'?`$", line)
    assert len(site.missing()) == 2


@pytest.mark.parametrize("other", ["mxnet-cu112", "mxnet-cu102", "mxnet-mkl"])
def test_two_of_mxnets_wheels_in_one_folder_are_refused_in_one_line(site, other):
    site.install_mxnet("mxnet")
    site.install(other)
    done = site.train()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: mxnet and {other} are both installed")
    assert f"`pip uninstall -y mxnet {other}`" in done.stderr


def test_only_the_wheel_counts_that_lies_beside_the_mxnet_that_would_be_imported(site, tmp_path):
    site.install_mxnet("mxnet")
    site.install("mxnet-model-server")
    (tmp_path / "first" / "mxnet_cu112-1.9.1.dist-info").mkdir(parents=True)
    done = site.python(f"import sys; sys.path.insert(0, {str(tmp_path / 'first')!r}); print(cuda.wheels())")
    assert done.stdout == "{'mxnet': '1.9.1'}\n", done.stderr


def test_the_extra_brings_mxnet_cu112_and_the_wheels_of_all_libraries():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[1] / "setup.cfg")
    extra = setup["options.extras_require"]["cu112"].split("\n")
    names = {line.split()[0] for line in extra if line}
    assert names == {"mxnet-cu112", *(wheel.partition("<")[0] for wheel, *_ in cuda.LIBRARIES)}
