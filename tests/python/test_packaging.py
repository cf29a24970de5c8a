"""The build and what it packages: refusals, the search for CUDA, the machine check, the wheel."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_native() -> ModuleType:
    spec = importlib.util.spec_from_file_location("native", ROOT / "scripts" / "native.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["native"] = module
    spec.loader.exec_module(module)
    return module


native = load_native()


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the root, with the environment of this process and `environ` over it."""
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True
    )


def refusal(call, *arguments) -> str:
    """The text of the BuildError that the call must raise."""
    with pytest.raises(native.BuildError) as caught:
        call(*arguments)
    return str(caught.value)


# --- machines and versions that are refused ---------------------------------------------------


@pytest.mark.parametrize(
    ("system", "machine", "python", "implementation", "words"),
    [
        ("Darwin", "arm64", (3, 11, 0), "CPython", "Linux x86-64 only"),
        ("Windows", "AMD64", (3, 11, 0), "CPython", "Linux x86-64 only"),
        ("Linux", "aarch64", (3, 11, 0), "CPython", "Linux x86-64 only"),
        ("Linux", "x86_64", (3, 9, 18), "CPython", "CPython 3.10 to 3.13"),
        ("Linux", "x86_64", (3, 14, 0), "CPython", "CPython 3.10 to 3.13"),
        ("Linux", "x86_64", (3, 11, 0), "PyPy", "CPython 3.10 to 3.13"),
    ],
)
def test_other_platforms_are_refused(system, machine, python, implementation, words) -> None:
    assert words in refusal(native.check_platform, system, machine, python, implementation)


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_supported_pythons_pass(minor: int) -> None:
    native.check_platform("Linux", "x86_64", (3, minor, 0), "CPython")


def fake_torch(folder: Path, version: str, cuda: str | None = None, hip: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "version.py").write_text(
        f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n"
    )
    return folder


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "1.13.1+cu117", "3.0.0", "", "nightly"])
def test_other_torch_versions_are_refused(tmp_path: Path, version: str) -> None:
    text = refusal(native.read_torch, fake_torch(tmp_path, version))
    assert "Install torch 2.11 to 2.13" in text


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0a0+git12"])
def test_supported_torch_versions_pass(tmp_path: Path, version: str) -> None:
    torch = native.read_torch(fake_torch(tmp_path, version, "13.0"))
    assert (torch.version, torch.cuda) == (version, "13.0")


def test_a_rocm_torch_and_a_broken_torch_are_refused(tmp_path: Path) -> None:
    assert "ROCm" in refusal(native.read_torch, fake_torch(tmp_path / "a", "2.11.0", hip="6.2"))
    (tmp_path / "b").mkdir()
    assert "Reinstall torch" in refusal(native.read_torch, tmp_path / "b")


def test_a_missing_and_an_old_compiler_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install g++" in refusal(native.check_compiler, {})
    assert "no mycc" in refusal(native.check_compiler, {"CXX": "mycc"})
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\n[ $1 = -dumpversion ] && echo 9 || echo 'g++ 9.4.0'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert "g++ is 9; g++ 11 or newer" in refusal(native.check_compiler, {})


def test_a_missing_cmake_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(native, "find_tool", lambda name: None)
    assert "pip install cmake ninja" in refusal(native.find_cmake)


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_wrong_job_count_is_refused(value: str) -> None:
    assert f"MAX_JOBS is '{value}'" in refusal(native.jobs, {"MAX_JOBS": value})


def test_jobs_follow_the_machine() -> None:
    assert 1 <= native.jobs({}) <= len(os.sched_getaffinity(0))
    assert native.jobs({"MAX_JOBS": "3"}) == 3


# --- the search for CUDA ----------------------------------------------------------------------


def fake_headers(folder: Path, names: tuple[str, ...], cudart: int = 13000) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    if "cuda_runtime.h" in names:
        text = f"#define CUDART_VERSION  {cudart}\n"
        (folder / "cuda_runtime_api.h").write_text(text)


def fake_library(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("")
    return folder / name


OF_TORCH = tuple(h for h in native.CUDA_HEADERS if not h.startswith(("crt/", "nv/")))
OF_TWO_WHEELS = tuple(h for h in native.CUDA_HEADERS if h.startswith(("crt/", "nv/")))
CUDA_TORCH = native.Torch(Path("torch"), "2.11.0+cu130", "13.0")
CPU_TORCH = native.Torch(Path("torch"), "2.11.0+cpu", None)


def test_cuda_headers_are_taken_from_several_site_packages(tmp_path: Path) -> None:
    first, second = tmp_path / "a/nvidia", tmp_path / "b/nvidia"
    fake_headers(first / "cu13/include", OF_TORCH)
    fake_headers(second / "cu13/include", OF_TWO_WHEELS)
    fake_headers(first / "nccl/include", ("nccl.h",))
    cudart = fake_library(first / "cu13/lib", "libcudart.so.13")
    cublas_lt = fake_library(second / "cublas/lib", "libcublasLt.so.13")
    cuda = native.find_cuda(CUDA_TORCH, [first, second], [])
    assert cuda.version == "13.0"
    assert (cuda.cudart, cuda.libraries) == (cudart, (cublas_lt,))
    assert set(cuda.includes) == {
        first / "cu13/include",
        second / "cu13/include",
        first / "nccl/include",
    }
    assert cuda.rpaths == ("$ORIGIN/../nvidia/cu13/lib", "$ORIGIN/../nvidia/cublas/lib")


def test_a_missing_cuda_library_is_named(tmp_path: Path) -> None:
    wheels = tmp_path / "nvidia"
    fake_headers(wheels / "cu13/include", OF_TORCH + OF_TWO_WHEELS)
    assert "no libcudart.so.13" in refusal(native.find_cuda, CUDA_TORCH, [wheels], [])
    fake_library(wheels / "cu13/lib", "libcudart.so.13")
    assert "no libcublasLt.so.13" in refusal(native.find_cuda, CUDA_TORCH, [wheels], [])


def test_missing_cuda_headers_are_named_with_both_remedies(tmp_path: Path) -> None:
    wheels = tmp_path / "nvidia"
    fake_headers(wheels / "cu13/include", OF_TORCH)
    fake_library(wheels / "cu13/lib", "libcudart.so.13")
    text = refusal(native.find_cuda, CUDA_TORCH, [wheels], [])
    assert "no crt/host_config.h, nv/target" in text
    for remedy in (
        "nvidia-cuda-crt==13.0.88",
        "nvidia-cuda-cccl==13.0.85",
        "CUDA_HOME",
        "ACC_CUDA=0",
    ):
        assert remedy in text


def test_a_toolkit_serves_where_the_wheels_are_incomplete(tmp_path: Path) -> None:
    wheels, toolkit = tmp_path / "nvidia", tmp_path / "cuda"
    fake_headers(wheels / "cu13/include", OF_TORCH)
    fake_headers(toolkit / "include", OF_TORCH + OF_TWO_WHEELS[:1])
    fake_headers(toolkit / "include/cccl", OF_TWO_WHEELS[1:])
    cudart = fake_library(toolkit / "lib64", "libcudart.so.13")
    fake_library(toolkit / "lib64", "libcublasLt.so.13")
    cuda = native.find_cuda(CUDA_TORCH, [wheels], [tmp_path / "nowhere", toolkit])
    assert cuda.includes == (toolkit / "include", toolkit / "include/cccl")
    assert (cuda.cudart, cuda.rpaths) == (cudart, ())


def test_wheels_and_a_toolkit_complete_each_other(tmp_path: Path) -> None:
    """A compiler alone has what torch's wheels leave out, and not what they have."""
    wheels, toolkit = tmp_path / "nvidia", tmp_path / "cuda"
    fake_headers(wheels / "cu13/include", OF_TORCH)
    cudart = fake_library(wheels / "cu13/lib", "libcudart.so.13")
    cublas_lt = fake_library(wheels / "cu13/lib", "libcublasLt.so.13")
    fake_headers(toolkit / "include", ("cuda_runtime.h", *OF_TWO_WHEELS[:1]))
    fake_headers(toolkit / "include/cccl", OF_TWO_WHEELS[1:])
    cuda = native.find_cuda(CUDA_TORCH, [wheels], [toolkit])
    includes = (wheels / "cu13/include", toolkit / "include", toolkit / "include/cccl")
    assert cuda.includes == includes
    assert (cuda.cudart, cuda.libraries) == (cudart, (cublas_lt,))
    assert cuda.rpaths == ("$ORIGIN/../nvidia/cu13/lib",)
    # headers of two versions are not mixed
    fake_headers(toolkit / "include", ("cuda_runtime.h",), cudart=13020)
    text = refusal(native.find_cuda, CUDA_TORCH, [wheels], [toolkit])
    assert "torch's wheels: no crt/host_config.h, nv/target" in text
    assert f"{toolkit}: no cublasLt.h" in text


def test_the_toolkit_of_the_compiler_on_path_is_asked(tmp_path: Path) -> None:
    (tmp_path / "cuda-13/bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    program(tmp_path / "cuda-13/bin", "nvcc", "")
    (tmp_path / "bin/nvcc").symlink_to(tmp_path / "cuda-13/bin/nvcc")
    folders = native.toolkit_folders({"PATH": str(tmp_path / "bin"), "CUDA_HOME": "/named"})
    assert folders == [Path("/named"), tmp_path / "cuda-13", Path("/usr/local/cuda")]
    assert native.toolkit_folders({"PATH": ""}) == [Path("/usr/local/cuda")]


def test_a_toolkit_of_another_major_version_is_not_taken(tmp_path: Path) -> None:
    toolkit = tmp_path / "cuda"
    fake_headers(toolkit / "include", native.CUDA_HEADERS, cudart=12080)
    fake_library(toolkit / "lib64", "libcudart.so.12")
    assert "headers of CUDA 12.8" in refusal(native.find_cuda, CUDA_TORCH, [], [toolkit])


def test_acc_cuda_decides(monkeypatch) -> None:
    monkeypatch.setattr(native, "nvidia_folders", list)
    monkeypatch.setattr(native, "toolkit_folders", lambda environ: [])
    assert "It is auto, 0 or 1" in refusal(native.choose_cuda, CUDA_TORCH, {"ACC_CUDA": "yes"})
    assert "is a CPU build" in refusal(native.choose_cuda, CPU_TORCH, {"ACC_CUDA": "1"})
    assert "ACC_CUDA=0" in refusal(native.choose_cuda, CUDA_TORCH, {"ACC_CUDA": "1"})
    assert native.choose_cuda(CUDA_TORCH, {"ACC_CUDA": "0"})[0] is None
    assert native.choose_cuda(CPU_TORCH, {})[0] is None
    cuda, why = native.choose_cuda(CUDA_TORCH, {"ACC_CUDA": "auto"})
    assert cuda is None and "nvidia-cuda-crt" in why  # builds for the host, and says why


# --- the machine check ------------------------------------------------------------------------

NEEDED_TOOLS = ("sh", "uname", "awk", "df", "id", "dirname", "cut")


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with the shell's own helpers and none of the tools that the check looks for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NEEDED_TOOLS:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text("#!/bin/sh\n" + text)
    (folder / name).chmod(0o755)


def check_machine(path: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run(str(path / "sh"), "scripts/check_machine.sh", *arguments, PATH=str(path), **environ)


def test_every_missing_program_is_named_with_its_package(bare_path: Path) -> None:
    result = check_machine(bare_path)
    assert result.returncode == 1
    for words in ("missing: git", "missing: make", "a C++ compiler", "python3, 3.10 to 3.13"):
        assert words in result.stderr
    assert "apt-get install -y git make g++ python3 python3-venv python3-dev" in result.stderr
    names = check_machine(bare_path, "--packages")
    assert names.returncode == 0
    assert names.stdout.split() == ["git", "make", "g++", "python3", "python3-venv", "python3-dev"]


def complete(path: Path, python: str = sys.executable) -> None:
    """Adds what the check looks for; python3 is this interpreter."""
    program(path, "git", "")
    program(path, "make", "")
    program(path, "g++", "echo 12\n")
    program(path, "python3", f'exec {python} "$@"\n')


def test_a_complete_machine_passes(bare_path: Path) -> None:
    complete(bare_path)
    result = check_machine(bare_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == f"python: {bare_path / 'python3'}"


def test_parts_of_python_that_are_missing_are_named(bare_path: Path) -> None:
    complete(bare_path)
    # an interpreter of 3.12 whose imports of venv fail and that has no Python.h
    text = 'case "$2" in *version_info*print*|*print*version_info*) echo 3.12 ;;'
    text += " *ensurepip*|*Python.h*) exit 1 ;; esac\n"
    program(bare_path, "python3", text)
    result = check_machine(bare_path)
    assert result.returncode == 1
    assert "apt-get install -y python3.12-venv python3.12-dev" in result.stderr


def test_an_unsupported_python_is_refused_by_name(bare_path: Path) -> None:
    complete(bare_path)
    program(bare_path, "python3", '[ "$1" = --version ] && echo Python 3.9.2; exit 1\n')
    result = check_machine(bare_path)
    assert result.returncode == 1
    assert "python3 is Python 3.9.2; Python 3.10 to 3.13 is needed" in result.stderr
    result = check_machine(bare_path, "python9")
    assert "PYTHON is 'python9', which is no program here" in result.stderr


def test_an_old_compiler_a_full_disk_and_another_system_are_refused(bare_path: Path) -> None:
    complete(bare_path)
    program(bare_path, "g++", "echo 9\n")
    assert "g++ is 9; 11 or newer" in check_machine(bare_path).stderr
    complete(bare_path)
    full = check_machine(bare_path, "--disk", "99999999")
    assert full.returncode == 1 and "99999999 GB are needed" in full.stderr
    other = check_machine(bare_path, ACC_CHECK_SYSTEM="Darwin", ACC_CHECK_MACHINE="arm64")
    assert other.returncode == 1 and "Linux x86-64 only" in other.stderr


# --- the commands -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("quickstart", "examples/quickstart.py"),
        ("test", "scripts/run_tests.py"),
        ("test-full", "scripts/run_tests.py --full"),
        ("develop", "scripts/native.py develop"),
        ("bench", "benchmarks/run.py --suite host"),
        ("lint", "scripts/lint.py"),
        ("clean", "rm -rf build"),
    ],
)
def test_the_commands_of_the_project_exist(target: str, words: str) -> None:
    result = run("make", "-n", target, PYTHON="")
    assert result.returncode == 0, result.stderr
    assert words in result.stdout


def test_ci_runs_make_test() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "exec make test"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_develop_fails_clearly_for_an_interpreter_without_torch() -> None:
    # -S hides site-packages, and torch with it
    result = run(sys.executable, "-S", "scripts/native.py", "develop", PYTHONPATH="")
    assert result.returncode == 1
    assert result.stderr.startswith("[torch] ") and "make quickstart" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_isolated_build_says_what_to_run() -> None:
    """pip builds in an environment without torch unless told not to; -S is such an environment."""
    result = run(sys.executable, "-S", "setup.py", "egg_info", PYTHONPATH="")
    assert result.returncode == 1
    assert "python -m pip install --no-build-isolation ." in result.stderr
    assert "Traceback" not in result.stderr


# --- the wheel --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree. The objects of the build in place are used again."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = ("-m", "pip", "--disable-pip-version-check", "wheel", "--no-build-isolation", "--no-deps")
    result = run(sys.executable, *pip, "--no-index", "-w", str(folder), str(ROOT))
    assert result.returncode == 0, result.stdout + result.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_installs_three_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"acc_torch-{native.VERSION}.dist-info"
    packages = {"torchacc", "torchacc_device", "tiacc_training"}
    assert {name.split("/")[0] for name in names} == {*packages, info}
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    for name in (
        f"torchacc_device/_C{suffix}",
        "torchacc_device/_build_info.py",
        "torchacc_device/py.typed",
        "torchacc/py.typed",
        "torchacc/graph_view/page.css",
        "torchacc/graph_view/page.html",
        "torchacc/graph_view/page.js",
        f"{info}/licenses/LICENSE",
        f"{info}/licenses/THIRD_PARTY_NOTICES.md",
    ):
        assert name in names
    for package in ("torchacc", "tiacc_training"):
        here = {p.relative_to(ROOT).as_posix() for p in (ROOT / package).rglob("*.py")}
        assert here <= set(names)
    assert not [name for name in names if name.endswith((".cpp", ".h", ".new", ".pyc"))]
    assert len([name for name in names if "/_C" in name]) == 1


def test_the_wheel_names_its_torch_and_its_entry_point(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    installed = native.find_torch()
    assert "Name: acc-torch\n" in metadata  # `torchacc` is another project's name
    release = native.dotted(native.numbers(installed.version))
    assert f"Requires-Dist: torch=={release}\n" in metadata
    (python,) = (line for line in metadata.splitlines() if line.startswith("Requires-Python: "))
    assert set(python.split()[1].split(",")) == {">=3.10", "<3.14"}
    entry_points = (info / "entry_points.txt").read_text()
    assert "[torch.backends]\nacc = torchacc_device:_autoload\n" in entry_points
    assert "xlarun = tiacc_training.launcher:xlarun\n" in entry_points
    name = "consolidate_and_reshard_fsdp_ckpts"
    assert f"{name} = torchacc.dist.consolidate:main\n" in entry_points


def test_the_wheel_holds_no_path_of_its_builder(unpacked: Path) -> None:
    (module,) = (unpacked / "torchacc_device").glob("_C*.so")
    content = module.read_bytes()
    assert b"$ORIGIN/../torch/lib" in content
    assert str(ROOT).encode() not in content


def imported(folder: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a folder where only `folder` can provide torchacc and torchacc_device."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(folder), **environ},
        capture_output=True,
        text=True,
    )


def test_the_wheel_works_outside_the_tree(unpacked: Path) -> None:
    code = (
        "import torch, torchacc_device as d; print(d.__file__); print(torch.ones(2, device='acc'))"
    )
    result = imported(unpacked, code)
    assert result.returncode == 0, result.stderr
    assert str(unpacked) in result.stdout and "device='acc:0'" in result.stdout


def test_another_torch_than_built_against_is_refused(unpacked: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(unpacked, site)
    facts = site / "torchacc_device" / "_build_info.py"
    version = native.find_torch().version
    facts.write_text(facts.read_text().replace(repr(version), repr("2.12.9+other")))
    (module,) = (site / "torchacc_device").glob("_C*.so")
    module.write_bytes(b"not a library: loading it would be another error")
    code = "import torch, torchacc_device"
    result = imported(site, code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode != 0
    assert "2.12.9+other" in result.stderr and version in result.stderr
    assert "ImportError" in result.stderr
    # `import torch` alone goes on without the device
    alone = imported(site, "import torch; print(torch.ones(2).sum().item())")
    assert (alone.returncode, alone.stdout.strip()) == (0, "2.0"), alone.stderr
