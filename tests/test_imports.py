"""Imports are lazy, and the core imports only torch, numpy and safetensors."""

import subprocess
import sys

import pytest

OPTIONAL = {"sklearn", "scipy", "matplotlib", "typer", "rich", "pandas"}
SLOW = {"torch", "sklearn", "scipy", "matplotlib", "pandas", "pymatgen", "ase", "pyarrow"}


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(['', *sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {line.split(".")[0] for line in found.stdout.splitlines()}


def test_import_loads_no_slow_or_optional_modules():
    assert not modules_after("import fmwc") & (SLOW | OPTIONAL)
    assert not modules_after("import fmwc.errors, fmwc.files, fmwc.identity, fmwc.readers") & (SLOW | OPTIONAL)


VERBS = (
    *("demo", "report", "train", "retrofit", "sample", "check", "filter"),
    *("edit", "judge", "screen", "studio"),
)
OF_EXPERIMENTS = ("bench", "control", "evaluate", "report", "reproduce", "screen", "study")
PREDICT = ("draw", "match")


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_loads_no_slow_modules(words):
    run = (
        f"sys.argv[1:] = {words}\nfrom fmwc.__main__ import main\n"
        "try: main()\nexcept SystemExit as stop: assert not stop.code"
    )
    assert not modules_after(run) & SLOW


@pytest.mark.parametrize(
    "words",
    [["--help"], *([verb, "--help"] for verb in OF_EXPERIMENTS), *(["predict", verb, "--help"] for verb in PREDICT)],
    ids=" ".join,
)
def test_help_of_experiments_loads_no_slow_modules(words):
    run = (
        f"sys.argv[1:] = {words}\nfrom fmwc.__main__ import main\n"
        "try: main('experiments.cli', 'python -m experiments')\nexcept SystemExit as stop: assert not stop.code"
    )
    assert not modules_after(run) & SLOW


@pytest.mark.parametrize(
    "statement", ["import fmwc; fmwc.sample", "import fmwc.sampling, fmwc.training, fmwc.checkpoint, fmwc.data"]
)
def test_core_imports_no_optional_modules(statement):
    loaded = modules_after(statement)
    assert "torch" in loaded
    assert not loaded & OPTIONAL


def test_every_command_is_tested():
    from experiments.cli import app as experiments
    from experiments.cli import predict
    from fmwc.cli import app

    assert {c.name or c.callback.__name__ for c in app.registered_commands} == set(VERBS)
    assert {c.callback.__name__ for c in experiments.registered_commands} == set(OF_EXPERIMENTS)
    assert {c.name for c in predict.registered_commands} == set(PREDICT)


def test_public_names_exist():
    import fmwc

    for name in fmwc.__all__:
        assert getattr(fmwc, name) is not None
        assert name in dir(fmwc)
    assert fmwc.__version__
    namespace: dict = {}
    exec("from fmwc import *", namespace)
    assert set(fmwc.__all__) <= namespace.keys()


def test_only_submodules_are_attributes():
    code = (
        "import fmwc\nassert fmwc.sampling.sample is fmwc.sample\nassert fmwc.recipes and fmwc.estimators.Linearised\n"
        "assert not hasattr(fmwc, 'nothing') and not hasattr(fmwc, '__main__')"
    )
    assert "torch" in modules_after(code)


def test_commands_load_without_the_resource_module():
    """Windows has no `resource` module."""
    statement = (
        "sys.modules['resource'] = None\nimport fmwc.cli, experiments.cost.costs, fmwc.domains, torch\n"
        "from pathlib import Path\n"
        "Path.read_text = lambda *a, **k: (_ for _ in ()).throw(OSError())\n"
        "assert experiments.cost.meter.peak(torch.device('cpu')) is None"
    )
    assert "torch" in modules_after(statement)


def test_a_campaign_in_one_process_does_not_import_ray():
    loaded = modules_after("import fmwc.screening, fmwc.screening.ray_engine")
    assert "pyarrow" in loaded
    assert "ray" not in loaded
