"""Packaging: `pip install --no-build-isolation .` and wheels. scripts/native.py does the build."""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import native  # noqa: E402

# Asked before setuptools is imported: in an isolated build this is the answer that helps.
try:
    native.check_this_platform()
    TORCH = native.find_torch()
except native.NoTorch as error:
    sys.exit(
        f"{error} pip builds in an environment of its own unless told not to, so a torch that is"
        " installed is not seen either. Run exactly: python -m pip install --no-build-isolation ."
    )
except native.BuildError as error:
    sys.exit(str(error))

import setuptools  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402

if native.numbers(setuptools.__version__) < (70, 1):
    try:
        import wheel  # noqa: F401
    except ImportError:
        sys.exit(
            f"[setup] setuptools {setuptools.__version__} makes no wheel by itself. Run"
            f" `{sys.executable} -m pip install 'setuptools>=77,<82'`."
        )


class BuildModule(build_ext):
    """Lets CMake make torchacc_device/_C, in place or in the folder that becomes the wheel."""

    def run(self):
        package = Path("torchacc_device")
        output = ROOT / package if self.inplace else Path(self.build_lib).resolve() / package
        try:
            native.build_module(output)
        except native.BuildError as error:
            sys.exit(str(error))

    def get_output_mapping(self):
        return {}


class BuildPython(build_py):
    """Copies the Python files, and nothing that an earlier in-place or wheel build left behind."""

    def run(self):
        if not self.editable_mode:
            for package in self.packages:
                shutil.rmtree(Path(self.build_lib) / package.split(".")[0], ignore_errors=True)
        super().run()


setuptools.setup(
    name=native.DISTRIBUTION,
    version=native.VERSION,
    description="A lazy PyTorch device: records eager scripts, plans them, and replays the plans",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    author="the acc authors",
    license="BSD-3-Clause",
    license_files=["LICENSE", "THIRD_PARTY_NOTICES.md"],
    python_requires=f">={native.dotted(native.PYTHON_MIN)},<{native.dotted(native.PYTHON_END)}",
    # the module runs with the torch it was built against and no other
    install_requires=[f"torch=={native.dotted(native.numbers(TORCH.version))}"],
    packages=setuptools.find_packages(
        include=["torchacc", "torchacc.*", "torchacc_device", "tiacc_training", "tiacc_training.*"]
    ),
    package_data={
        "torchacc": ["py.typed"],
        "torchacc.graph_view": ["page.css", "page.html", "page.js"],
        "torchacc_device": ["py.typed", "*.pyi"],
    },
    include_package_data=False,
    ext_modules=[setuptools.Extension("torchacc_device._C", sources=[])],
    cmdclass={"build_ext": BuildModule, "build_py": BuildPython},
    entry_points={
        "torch.backends": ["acc = torchacc_device:_autoload"],
        "console_scripts": [
            "consolidate_and_reshard_fsdp_ckpts = torchacc.dist.consolidate:main",
            "xlarun = tiacc_training.launcher:xlarun",
        ],
    },
    zip_safe=False,
)
