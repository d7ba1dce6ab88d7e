"""The wheel: what is in it, how large it is, and that it works without the repository.

By default the installed wheel uses the packages of this environment. `make wheel` installs them again instead, into a
new environment of the Python that FMWC_WHEEL names (FMWC_WHEEL=python3.12), and runs more tests.
"""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import fmwc

ROOT = Path(__file__).parents[1]
CLEAN = os.environ.get("FMWC_WHEEL", "")
LARGEST = 38_000_000  # bytes of the wheel; CONTRIBUTING.md says what takes them


def run(*words, **options):
    found = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the source distribution and, from it, the wheel."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """Install the wheel into a new environment, without extras if it is clean; return its Python."""
    folder = tmp_path_factory.mktemp("environment")
    run(CLEAN or sys.executable, "-m", "venv", *([] if CLEAN else ["--without-pip"]), folder)
    inside = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if CLEAN:
        run(inside, "-m", "pip", "install", "--quiet", built[0])
    else:
        run(sys.executable, "-m", "pip", "--python", inside, "install", "--quiet", "--no-deps", "--no-index", built[0])
        packages = Path(run(inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (packages / "others.pth").write_text(sysconfig.get_path("purelib"))  # not those that its .pth files name
    return inside


@pytest.fixture(scope="module")
def with_command(built, python):
    """The same environment with the packages of the command."""
    if CLEAN:
        run(python, "-m", "pip", "install", "--quiet", f"{built[0]}[cli]", "pytest", "hypothesis")
    return python


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A working folder outside the repository, which Python does not find."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


# ---- content ---------------------------------------------------------------------------------------------------------


def test_wheel_holds_the_package_its_weights_and_every_licence(built):
    assert built[0].stat().st_size <= LARGEST
    with zipfile.ZipFile(built[0]) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    folders = {name.split("/")[0] for name in names}
    assert folders == {"fmwc", f"fmwc-{fmwc.__version__}.dist-info"}
    assert {"fmwc/py.typed", "fmwc/_commit.py", "fmwc/crystals/chgnet_hull.npz"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    vendored = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("vendor/*.js")}
    assert vendored
    for name in vendored:
        assert name.replace("-min.js", "-LICENSE.txt") in names
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "src/fmwc", cwd=ROOT).split()
    assert {name.removeprefix("src/") for name in tracked} | {"fmwc/_commit.py"} == {
        n for n in names if n.startswith("fmwc/")
    }
    assert "Provides-Extra: cli" in metadata


# ---- use -------------------------------------------------------------------------------------------------------------


def test_without_extras_the_library_works_and_the_command_says_what_to_install(python, outside):
    code = (
        "import fmwc, torch\n"
        "from fmwc.networks import MLP\n"
        "field = fmwc.attach(MLP(dim=2, hidden=16, depth=1), space=(2,))\n"
        "fmwc.fit_noise(field, torch.randn(64, 2), steps=2, conventions=False, confidence=False)\n"
        "print(fmwc.__file__, fmwc.sample(field, 4, steps=5).rank.shape, len(fmwc.load('checkerboard').noise.names))\n"
    )
    found = run(python, "-c", code)
    assert str(ROOT) not in found
    assert "torch.Size([4])" in found
    missing = "" if CLEAN else "sys.modules['typer'] = None; "
    command = f"import sys; {missing}from fmwc.__main__ import main; sys.argv = ['fmwc', 'demo']; main()"
    failed = subprocess.run([str(python), "-c", command], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr == "fmwc: this command needs 'typer'; install it with: pip install 'fmwc[cli]'\n"


def test_demo_runs_from_the_wheel(with_command, outside):
    command = with_command.parent / "fmwc"
    assert f"fmwc {fmwc.__version__}" in run(command, "--version")
    run(command, "demo", "-n", 200, "--device", "cpu", "--out", "demo", env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (outside / "demo" / "report.html").stat().st_size > 10_000
