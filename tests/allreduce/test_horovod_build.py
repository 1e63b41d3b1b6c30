"""``make horovod``: rejected environments, caching, and the resulting build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch import ROOT, needs
from tests.run_program import run_program

SCRIPT = "tools/build-horovod.sh"
TOOLS = ("bash", "cat", "cmp", "cp", "dirname", "grep", "gzip", "mktemp", "mv", "nproc", "rm", "sh")
"""Commands that the script may use in addition to those that it checks for."""
COMPILERS = ("c++", "make", "mpicxx", "cmake")

# The real Python, with a pip that installs nothing and records its calls. A "download" is a copy.
PYTHON = """#!/bin/sh
case "$*" in
*"pip download"*) echo download >>"{folder}/calls"; cp "{folder}/horovod-0.28.1.tar.gz" "${{10}}" ;;
*"pip install"*) echo install >>"{folder}/calls" ;;
*) exec "{python}" {options} "$@" ;;
esac
"""
SOURCES = {
    "setup.py": "config = 'RelWithDebInfo'\ncmake_args = ['-DCMAKE_BUILD_TYPE=' + config]\n",
    "CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)\nif(CMAKE_CUDA_COMPILER)\nendif()\n",
    "horovod/torch/CMakeLists.txt": "set(CMAKE_CXX_STANDARD 14)\n-c "
    '"from distutils.sysconfig import get_python_inc; print(get_python_inc())"\n',
    "cmake/Modules/FindPytorch.cmake": "print(True if ((torch.version.cuda is not None) and "
    "(CUDA_HOME is not None)) else False)\n",
}


class House:
    """A folder with the script, an environment that installs nothing, and selected tools."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (SCRIPT, "constraints.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "bin").mkdir()
        for name in (*TOOLS, "sha256sum", "tar"):
            result = shutil.which(name)
            assert result, name
            (folder / "bin" / name).symlink_to(result)
        for name in COMPILERS:
            self._program(folder / "bin" / name, "#!/bin/sh\n")
        self.environment()
        self.sources(SOURCES)

    def environment(self, options: str = "") -> None:
        """Create .venv with this Python, by a call with ``options``."""
        (self.folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        text = PYTHON.format(folder=self.folder, python=sys.executable, options=options)
        self._program(self.folder / ".venv" / "bin" / "python", text)

    def sources(self, files: dict[str, str]) -> None:
        """Provide ``files`` for download."""
        for name, text in files.items():
            file = self.folder / "horovod-0.28.1" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        with tarfile.open(self.folder / "horovod-0.28.1.tar.gz", "w:gz") as tar:
            tar.add(self.folder / "horovod-0.28.1", "horovod-0.28.1")

    @staticmethod
    def _program(file: Path, text: str) -> None:
        file.write_text(text)
        file.chmod(0o755)

    def build(self, **env: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_") and k != "CXX"}
        return subprocess.run(
            ["bash", str(self.folder / SCRIPT)],
            env={**kept, "PATH": str(self.folder / "bin"), **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def refusal(self, **env: str) -> str:
        """Run the script, which must fail without installing anything; return its message."""
        completed = self.build(**env)
        assert completed.returncode == 1, repr(completed)
        assert not (self.folder / ".venv" / ".installed-horovod").exists()
        assert all(line.startswith("build-horovod: ") for line in completed.stderr.splitlines()), (
            repr(completed)
        )
        return completed.stderr

    def calls(self) -> list[str]:
        """Return the recorded calls of pip."""
        file = self.folder / "calls"
        return file.read_text().split() if file.exists() else []


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.mark.parametrize(
    ("tool", "name"), [("c++", "C++ compiler"), ("make", "'make'"), ("mpicxx", "'mpicxx'")]
)
def test_horovod_build_names_missing_tool(house: House, tool: str, name: str) -> None:
    (house.folder / "bin" / tool).unlink()
    assert name in house.refusal()
    assert house.calls() == []


def test_horovod_build_names_missing_cmake(house: House) -> None:
    """pip provides CMake, so it is detected later."""
    (house.folder / "bin" / "cmake").unlink()
    assert "'cmake'" in house.refusal()


def test_horovod_build_uses_compiler_of_cxx_variable(house: House) -> None:
    (house.folder / "bin" / "c++").rename(house.folder / "bin" / "g++-14")
    assert "C++ compiler" in house.refusal()
    assert house.build(CXX="g++-14").returncode == 0


def test_horovod_build_names_missing_environment(house: House) -> None:
    shutil.rmtree(house.folder / ".venv")
    assert "tools/setup-venv.sh" in house.refusal()


def test_horovod_build_names_missing_torch(house: House) -> None:
    house.environment("-S")  # without site-packages
    assert re.search(r"\btorch\b.*\.venv", house.refusal())
    assert house.calls() == []


def test_horovod_build_names_failed_download(house: House) -> None:
    (house.folder / "horovod-0.28.1.tar.gz").unlink()
    completed = house.build()
    assert completed.returncode == 1
    assert re.search(r"build-horovod: .*Horovod 0\.28\.1 .*download", completed.stderr)


@pytest.mark.parametrize("file", SOURCES)
def test_horovod_build_rejects_other_sources(house: House, file: str) -> None:
    house.sources({file: "set(CMAKE_CXX_STANDARD 17)\n"})
    error = house.refusal()
    assert f"{file} of Horovod 0.28.1 " in error and "tools/build-horovod.sh" in error
    assert house.calls() == ["install", "download"]  # the build tools, and no Horovod


def test_horovod_build_runs_once_per_configuration(house: House) -> None:
    completed = house.build()
    assert completed.returncode == 0, repr(completed)
    assert house.calls() == ["install", "download", "install"]
    again = house.build(HOROVOD_GPU_OPERATIONS="")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len(house.calls()) == 3
    assert house.build(HOROVOD_GPU_OPERATIONS="NCCL").returncode == 0
    assert len(house.calls()) == 6


PROGRAM = Path(__file__).parent / "programs" / "horovod_sum.py"


@pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not built (make horovod)")
@needs("openmpi")
def test_built_horovod_sums_next_to_mpi4py() -> None:
    completed = run_program(PROGRAM, 2, timeout=100, is_warm=False)
    assert completed.stdout.count("summed") == 2
