"""Builds the C++ side: finds torch, Python and CUDA, and drives CMake.

    python scripts/native.py develop     build torchacc_device/_C*.so in place
    python scripts/native.py info        print what would be built against, build nothing
    python scripts/native.py torch       print the version of torch
    python scripts/native.py cuda-wheels print the header packages that this torch wants
    python scripts/native.py ctest       build and run tests/cpp [--sanitizer NAME] [--once]

setup.py uses the same functions for wheels. Needs the standard library, torch, CMake and a C++
compiler; torch is looked at, never imported. Every refusal is a BuildError of one line that says
what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GTEST_SOURCE = ROOT / ".venv/googletest/src/gtest_vendor"  # where scripts/setup.sh puts it
VERSION = "0.1.0"
DISTRIBUTION = "acc-torch"
PYTHON_MIN, PYTHON_END = (3, 10), (3, 14)
TORCH_MIN, TORCH_END = (2, 11), (2, 14)
CMAKE_MIN = (3, 22)
GXX_MIN = 11
CUDA_HEADERS = (
    "cuda_runtime.h",
    "crt/host_config.h",
    "nv/target",
    "cublasLt.h",
    "cusparse.h",
    "cusolverDn.h",
    "nvrtc.h",
)


class BuildError(Exception):
    """The build is refused or failed. The text names the remedy."""


class NoTorch(BuildError):
    """The interpreter that builds has no torch at all."""


@dataclass(frozen=True)
class Torch:
    """An installed torch: its package folder and what torch/version.py says."""

    path: Path
    version: str
    cuda: str | None


@dataclass(frozen=True)
class Cuda:
    """Where the parts of the CUDA toolkit were found that the build needs."""

    version: str
    includes: tuple[Path, ...]
    cudart: Path
    libraries: tuple[Path, ...] = ()
    rpaths: tuple[str, ...] = field(default=())


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '2.11.0+cu130' is (2, 11, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def check_platform(system: str, machine: str, python: tuple[int, ...], implementation: str) -> None:
    """Refuses every machine and interpreter outside the supported matrix."""
    if system != "Linux" or machine not in ("x86_64", "amd64", "AMD64"):
        raise BuildError(
            f"[platform] this is {system} on {machine}. acc runs on Linux x86-64 only."
        )
    if implementation != "CPython" or not PYTHON_MIN <= python[:2] < PYTHON_END:
        raise BuildError(
            f"[python] this is {implementation} {dotted(python)}. Use CPython"
            f" {dotted(PYTHON_MIN)} to {PYTHON_END[0]}.{PYTHON_END[1] - 1}."
        )


def check_this_platform() -> None:
    check_platform(
        platform.system(),
        platform.machine(),
        sys.version_info[:3],
        platform.python_implementation(),
    )


def find_torch() -> Torch:
    """The torch of this interpreter, without importing it; refuses versions never built against."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NoTorch(
            f"[torch] {sys.executable} sees no torch, and the module is built against the very"
            " torch that it runs with. Run `make quickstart`, or install torch"
            f" {dotted(TORCH_MIN)} to {TORCH_END[0]}.{TORCH_END[1] - 1} first."
        )
    return read_torch(Path(spec.origin).resolve().parent)


def read_torch(path: Path) -> Torch:
    """Reads torch/version.py under `path` and checks it against the supported range."""
    try:
        facts = runpy.run_path(str(path / "version.py"))
    except OSError as error:
        raise BuildError(
            f"[torch] {path} has no readable version.py ({error}). Reinstall torch."
        ) from None
    version = str(facts.get("__version__", ""))
    if not TORCH_MIN <= numbers(version)[:2] < TORCH_END:
        raise BuildError(
            f"[torch] {path} holds torch {version or '(unknown)'}."
            f" Install torch {dotted(TORCH_MIN)} to {TORCH_END[0]}.{TORCH_END[1] - 1}."
        )
    if facts.get("hip") or facts.get("xpu"):
        raise BuildError(
            f"[torch] {path} is a build of torch {version} for ROCm or XPU. Install a CPU or CUDA"
            " build of torch."
        )
    return Torch(path, version, facts.get("cuda"))


def uses_cxx11_abi(torch: Torch) -> bool:
    """Whether libc10's symbols carry the C++11 ABI's mark."""
    return b"__cxx11" in (torch.path / "lib" / "libc10.so").read_bytes()


def nvidia_folders() -> list[Path]:
    """Every folder of the `nvidia` namespace, which may span several site-packages."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(entry) for entry in spec.submodule_search_locations]


def toolkit_folders(environ: dict[str, str]) -> list[Path]:
    """Installed toolkits as they are asked: CUDA_HOME, CUDA_PATH, that of nvcc, /usr/local/cuda."""
    named = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc:
        named.append(str(Path(nvcc).resolve().parents[1]))
    return [Path(entry) for entry in dict.fromkeys((*named, "/usr/local/cuda"))]


def cuda_of_headers(folder: Path) -> str | None:
    """'13.0' for a folder whose cuda_runtime_api.h says CUDART_VERSION 13000."""
    header = folder / "cuda_runtime_api.h"
    if not header.is_file():
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}" if match else None


def collect_headers(folders: list[Path]) -> tuple[list[Path], list[str]]:
    """The folders that are needed for CUDA_HEADERS, and the headers that none of them has."""
    used: list[Path] = []
    missing: list[str] = []
    for header in CUDA_HEADERS:
        home = next((folder for folder in folders if (folder / header).is_file()), None)
        if home is None:
            missing.append(header)
        elif home not in used:
            used.append(home)
    return used, missing


def same_cuda(some: list[Path], others: list[Path]) -> bool:
    """Whether two sets of folders hold headers of one CUDA version, as far as they say."""
    versions = {found for folder in (*some, *others) if (found := cuda_of_headers(folder))}
    return len(versions) < 2


def find_library(folders: list[Path], name: str, major: str) -> Path | None:
    """`name` by its full path: wheels ship libX.so.N, and no libX.so for -lX."""
    for folder in folders:
        candidate = folder / f"{name}.{major}"
        if candidate.is_file():
            return candidate
    return None


def find_cuda(torch: Torch, wheels: list[Path], toolkits: list[Path]) -> Cuda:
    """Headers and libraries of torch's own CUDA: its wheels first, a toolkit, both together.

    `wheels` are folders of the nvidia namespace, `toolkits` are roots of installed toolkits.
    Raises BuildError that names what is missing and both remedies.
    """
    if torch.cuda is None:
        raise BuildError(
            f"[cuda] ACC_CUDA=1, but torch {torch.version} is a CPU build. Install a CUDA build of"
            " torch, or leave ACC_CUDA out."
        )
    major = torch.cuda.split(".")[0]
    parts = [part for wheel in wheels for part in sorted(wheel.iterdir()) if part.is_dir()]
    parts = [
        part for part in parts if not re.fullmatch(r"cu\d+", part.name) or part.name == f"cu{major}"
    ]
    wheel_includes = [part / "include" for part in parts]
    wheel_includes += [folder / "cccl" for folder in wheel_includes]
    sources = [
        ("torch's wheels", [f for f in wheel_includes if f.is_dir()], [p / "lib" for p in parts])
    ]
    for toolkit in toolkits:
        include = toolkit / "include"
        folders = [f for f in (include, include / "cccl") if f.is_dir()]
        libraries = [toolkit / "lib64", toolkit / "lib", toolkit / "targets/x86_64-linux/lib"]
        sources.append((str(toolkit), folders, libraries))
    # Wheels without crt/ and a toolkit without cuBLAS suffice together, if of one version.
    sources = [source for source in sources if source[1]]
    if sources and sources[0][0] == "torch's wheels":
        name, folders, libraries = sources[0]
        sources += [
            (f"{name} with {other}", folders + more, libraries + more_libraries)
            for other, more, more_libraries in sources[1:]
            if same_cuda(folders, more)
        ]

    tried = []
    for name, folders, libraries in sources:
        used, missing = collect_headers(folders)
        found = next(filter(None, map(cuda_of_headers, folders)), None)
        cudart = find_library(libraries, "libcudart.so", major)
        cublas_lt = find_library(libraries, "libcublasLt.so", major)
        if missing:
            tried.append(f"{name}: no {', '.join(missing)}")
        elif found is None or found.split(".")[0] != major:
            tried.append(f"{name}: headers of CUDA {found}")
        elif cudart is None:
            tried.append(f"{name}: no libcudart.so.{major}")
        elif cublas_lt is None:
            tried.append(f"{name}: no libcublasLt.so.{major}")
        else:
            extra = [part / "include" for part in parts if (part / "include/nccl.h").is_file()]
            rpaths = tuple(
                f"$ORIGIN/../nvidia/{part.name}/lib"
                for part in parts
                if part / "lib" in (cudart.parent, cublas_lt.parent)
            )
            includes = (*used, *(folder for folder in extra if folder not in used))
            return Cuda(found, includes, cudart, (cublas_lt,), rpaths)
    pins = " ".join(cuda_wheels(torch.cuda))
    install = f"Run `{sys.executable} -m pip install {pins}`, or install" if pins else "Install"
    raise BuildError(
        f"[cuda] no complete set of CUDA {torch.cuda} headers ({'; '.join(tried) or 'no folder'})."
        f" {install} the CUDA {torch.cuda} toolkit and set CUDA_HOME, or build without CUDA with"
        " ACC_CUDA=0."
    )


def cuda_wheels(cuda: str) -> tuple[str, ...]:
    """The packages with the headers that torch's own wheels leave out; () where none is known."""
    pins = Path(__file__).parent / "requirements" / f"cuda-{cuda}.txt"
    if pins.is_file():
        lines = (line.strip() for line in pins.read_text().splitlines())
        return tuple(line for line in lines if line and not line.startswith("#"))
    if cuda.startswith("13."):
        return (f"nvidia-cuda-crt=={cuda}.*", f"nvidia-cuda-cccl=={cuda}.*")
    return ()


def choose_cuda(torch: Torch, environ: dict[str, str]) -> tuple[Cuda | None, str]:
    """What ACC_CUDA (auto, 0 or 1) comes to on this machine, and why in a few words."""
    wish = environ.get("ACC_CUDA", "").strip() or "auto"
    if wish not in ("auto", "0", "1"):
        raise BuildError(f"[cuda] ACC_CUDA is '{wish}'. It is auto, 0 or 1.")
    if wish == "0":
        return None, "off (ACC_CUDA=0)"
    if wish == "auto" and torch.cuda is None:
        return None, "off (a CPU build of torch)"
    try:
        cuda = find_cuda(torch, nvidia_folders(), toolkit_folders(environ))
    except BuildError as error:
        if wish == "1":
            raise
        return None, f"off. {error}"
    return cuda, f"on, CUDA {cuda.version}, headers in {cuda.includes[0]}"


def find_tool(name: str) -> str | None:
    """A program of this interpreter's packages, else on PATH.

    Packages that .venv sees through another interpreter keep their programs beside that one.
    """
    folders = [Path(sys.executable).parent]
    folders += [Path(p).parents[2] / "bin" for p in sys.path if p.endswith("site-packages")]
    for folder in folders:
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    return shutil.which(name)


def find_cmake() -> str:
    cmake = find_tool("cmake")
    text = ""
    if cmake:
        text = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"version (\d+(\.\d+)*)", text)
    if not match or numbers(match[1]) < CMAKE_MIN:
        raise BuildError(
            f"[cmake] {'CMake ' + match[1] + ' is too old' if match else 'no working cmake'}; CMake"
            f" {dotted(CMAKE_MIN)} or newer is needed. Run"
            f" `{sys.executable} -m pip install cmake ninja` or"
            " `apt-get install cmake ninja-build`."
        )
    return str(cmake)


def check_compiler(environ: dict[str, str]) -> str:
    """What the C++ compiler (CXX, g++ or clang++) says of itself; refuses one that is too old."""
    wish = environ.get("CXX", "").strip()
    names = [wish] if wish else ["g++", "clang++"]
    compiler = next((name for name in names if shutil.which(name.split()[0])), None)
    if compiler is None:
        raise BuildError(
            f"[compiler] no {' or '.join(names)}. Run `apt-get install g++`, or set CXX."
        )
    text = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True).stdout
    first = text.splitlines()[0] if text else compiler
    found = subprocess.run(
        [*compiler.split(), "-dumpversion"], capture_output=True, text=True
    ).stdout
    if "clang" not in first and numbers(found) and numbers(found)[0] < GXX_MIN:
        raise BuildError(
            f"[compiler] {compiler} is {found.strip()}; g++ {GXX_MIN} or newer is needed (C++20)."
            f" Run `apt-get install g++-{GXX_MIN}` and set CXX=g++-{GXX_MIN}."
        )
    return first


def check_python_headers() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        raise BuildError(f"[python] no Python.h in {include}. Run `apt-get install {name}`.")
    return include


def build_info(torch: Torch, cuda: Cuda | None) -> str:
    """The text of torchacc_device/_build_info.py."""
    facts = {
        "VERSION": VERSION,
        "TORCH_VERSION": torch.version,
        "CUDA": torch.cuda if cuda else None,
        "CXX11_ABI": uses_cxx11_abi(torch),
        "PYTHON_TAG": python_tag(),
    }
    lines = [f"{name} = {value!r}\n" for name, value in facts.items()]
    return '"""What this build was made against. Written by the build."""\n\n' + "".join(lines)


def python_tag() -> str:
    return f"cp{sys.version_info[0]}{sys.version_info[1]}"


def write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def jobs(environ: dict[str, str]) -> int:
    """Compilers at a time: one per core and per 1.5 GB of free memory; MAX_JOBS overrides."""
    wish = environ.get("MAX_JOBS", "").strip()
    if wish:
        if not wish.isdigit() or int(wish) < 1:
            raise BuildError(f"[build] MAX_JOBS is '{wish}'. It is a number from 1 up.")
        return int(wish)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        text = Path("/proc/meminfo").read_text()
        match = re.search(r"MemAvailable:\s+(\d+) kB", text)
        free = int(match[1]) * 1024 if match else free
    except OSError:
        pass
    return max(1, min(len(os.sched_getaffinity(0)), free // (3 << 29)))


def run(command: list[str], environ: dict[str, str]) -> None:
    """Runs a tool in the open, so that a long build is seen to move."""
    status = subprocess.run(command, cwd=ROOT, env=environ).returncode
    if status != 0:
        raise BuildError(
            f"[build] `{' '.join(command[:4])} ...` ended with status {status}. The compiler's or"
            " CMake's own message stands above; `make clean` removes a build made half."
        )


@contextlib.contextmanager
def locked(build: Path) -> Iterator[None]:
    """Holds the folder's lock: two builds in one folder would write the same objects."""
    build.parent.mkdir(parents=True, exist_ok=True)
    with open(build.with_name(build.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another build in {build.relative_to(ROOT)}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cache_fits(text: str, environ: dict[str, str]) -> bool:
    """Whether a CMakeCache was made in this tree and with the compiler that is asked for."""
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", text, re.MULTILINE)
    wish = shutil.which((environ.get("CXX", "").split() or [""])[0])
    same = wish is None or (
        compiler is not None and os.path.realpath(compiler[1]) == os.path.realpath(wish)
    )
    return same and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" in text


def cmake_build(build: Path, options: dict[str, str], environ: dict[str, str]) -> None:
    """Configures `build` with the options (-DNAME=VALUE) and builds all of it."""
    cmake = find_cmake()
    check_compiler(environ)
    cache = build / "CMakeCache.txt"
    if cache.is_file() and not cache_fits(cache.read_text(), environ):
        shutil.rmtree(build)
    ninja = find_tool("ninja")
    if cache.is_file():
        generator = []
    elif ninja:
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    else:
        generator = ["-G", "Unix Makefiles"]
    settings = [f"-D{name}={value}" for name, value in options.items()]
    build.mkdir(parents=True, exist_ok=True)
    run(
        [cmake, "-S", str(ROOT), "-B", str(build), *generator, *settings, "--log-level=NOTICE"],
        environ,
    )
    run([cmake, "--build", str(build), "--parallel", str(jobs(environ))], environ)


def build_folder(torch: Torch, cuda: Cuda | None) -> Path:
    """One folder per interpreter, torch and CUDA choice, so that switching rebuilds nothing."""
    name = f"{python_tag()}-torch{torch.version}-{'cuda' if cuda else 'host'}"
    return ROOT / "build" / re.sub(r"[^\w.-]", "-", name)


def build_module(
    output: Path,
    environ: dict[str, str] | None = None,
    *,
    emulator: bool = False,
    tests: bool = False,
    once: bool = False,
) -> Path:
    """Builds the extension module and _build_info.py into `output`; returns the build folder.

    `emulator`: also what tests of the module load, which stays in the build folder. `tests`: also
    tests/cpp, of the same objects; `once`: see `run_ctest`.
    """
    environ = dict(os.environ if environ is None else environ)
    check_this_platform()
    torch = find_torch()
    include = check_python_headers()
    cuda, why = choose_cuda(torch, environ)
    build = build_folder(torch, cuda)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    print(f"acc {VERSION}: torch {torch.version} in {torch.path}", flush=True)
    print(f"acc {VERSION}: CUDA {why}", flush=True)
    options = {
        "ACC_MODULE": "ON",
        "ACC_TORCH_DIR": str(torch.path),
        "ACC_PYTHON_INCLUDE": str(include),
        "ACC_EXT_SUFFIX": suffix,
        "ACC_OUTPUT_DIR": str(build / "module"),
        "ACC_TESTS": "ON" if tests else "OFF",
        "ACC_TESTS_TWICE": "OFF" if once else "ON",
        "ACC_GTEST_SOURCE": str(GTEST_SOURCE),
        "ACC_CUDA": "ON" if cuda else "OFF",
        "ACC_CUDA_INCLUDES": ";".join(map(str, cuda.includes)) if cuda else "",
        "ACC_CUDART": str(cuda.cudart) if cuda else "",
        "ACC_CUDA_LIBRARIES": ";".join(map(str, cuda.libraries)) if cuda else "",
        "ACC_RPATH": ":".join(("$ORIGIN/../torch/lib", *(cuda.rpaths if cuda else ()))),
    }
    if emulator:  # else as it was: CMake removes what it no longer builds
        options["ACC_EMULATOR"] = "ON"
    with locked(build):
        cmake_build(build, options, environ)
        install_module(build / "module" / f"_C{suffix}", output, build_info(torch, cuda))
    return build


def build_thread_sanitized(environ: dict[str, str] | None = None) -> Path:
    """Builds the module for the host and tests/cpp under the thread sanitizer; returns the folder.

    `site` in it is for PYTHONPATH and holds a copy of torchacc_device with that module. The
    interpreter that imports it has to run with the sanitizer's runtime preloaded (tests/threads
    does).
    """
    environ = dict(os.environ if environ is None else environ)
    torch = find_torch()
    build = build_folder(torch, None).with_name(build_folder(torch, None).name + "-thread")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    options = {
        "ACC_MODULE": "ON",
        "ACC_TESTS": "ON",
        "ACC_SAN": "thread",
        "ACC_TORCH_DIR": str(torch.path),
        "ACC_PYTHON_INCLUDE": str(check_python_headers()),
        "ACC_EXT_SUFFIX": suffix,
        "ACC_OUTPUT_DIR": str(build / "module"),
        "ACC_CUDA": "OFF",
        "ACC_GTEST_SOURCE": str(GTEST_SOURCE),
    }
    package = build / "site" / "torchacc_device"
    with locked(build):
        cmake_build(build, options, environ)
        package.mkdir(parents=True, exist_ok=True)
        for source in (ROOT / "torchacc_device").glob("*.py"):
            write_if_changed(package / source.name, source.read_text())
        install_module(build / "module" / f"_C{suffix}", package, build_info(torch, None))
    return build


def install_module(made: Path, output: Path, info: str) -> None:
    """Puts the module, the program beside it and _build_info.py into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    for source in (made, made.with_name("acc_nvrtc")):
        target = output / source.name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            # a process may have the old file mapped: replace the file, do not write into it
            fresh = target.with_name(target.name + ".new")
            shutil.copy(source, fresh)
            os.replace(fresh, target)
    write_if_changed(output / "_build_info.py", info)


def run_ctest(sanitizer: str, *, once: bool) -> None:
    """Builds tests/cpp and runs it under CTest: of the module's own objects, or under a sanitizer.

    Under the address sanitizer it is built without torch, in a folder of its own. `once`: leaves
    out what needs to run but once, of both ways (cmake/tests.cmake).
    """
    environ = dict(os.environ)
    if sanitizer == "address":
        build = ROOT / "build" / "tests-address"
        options = {
            "ACC_MODULE": "OFF",
            "ACC_TESTS": "ON",
            "ACC_TESTS_TWICE": "OFF" if once else "ON",
            "ACC_SAN": sanitizer,
            "ACC_GTEST_SOURCE": str(GTEST_SOURCE),
        }
        with locked(build):
            cmake_build(build, options, environ)
    elif sanitizer == "thread":
        build = build_thread_sanitized(environ)
    else:
        output = ROOT / "torchacc_device"
        build = build_module(output, environ, emulator=True, tests=True, once=once)
    ctest = [str(Path(find_cmake()).with_name("ctest")), "--test-dir", str(build)]
    parallel = ["--parallel", str(jobs(environ))]
    run([*ctest, "--output-on-failure", "--no-tests=error", *parallel], environ)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="native.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("develop", help="build the module in place")
    commands.add_parser("torch", help="print torch's version")
    commands.add_parser("cuda-wheels", help="print the header packages that this torch wants")
    commands.add_parser("info", help="print what would be built against")
    ctest = commands.add_parser("ctest", help="build and run tests/cpp")
    ctest.add_argument("--sanitizer", choices=("", "address", "thread"), default="")
    ctest.add_argument("--once", action="store_true", help="without what both ways would run")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "develop":
            build_module(ROOT / "torchacc_device", emulator=True)
            print("built torchacc_device")
        elif arguments.command == "ctest":
            run_ctest(arguments.sanitizer, once=arguments.once)
        elif arguments.command == "torch":
            print(find_torch().version)
        elif arguments.command == "cuda-wheels":
            print(*cuda_wheels(find_torch().cuda or ""))
        else:
            check_this_platform()
            torch = find_torch()
            print(f"python   {sys.version.split()[0]} ({sys.executable})")
            print(f"torch    {torch.version} ({torch.path})")
            print(f"cuda     {choose_cuda(torch, dict(os.environ))[1]}")
            print(f"compiler {check_compiler(dict(os.environ))}")
            print(f"cmake    {find_cmake()}")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
